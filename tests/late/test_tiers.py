"""Weights on the host under a device that is behind: bounded memory however far the host runs ahead, and whole copies."""

from __future__ import annotations

import gc
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import nn

import shoal
from shoal.testing import ranks_on, run_ranks
from shoal.tier import Disk, Memory, Swap, elastic, mirrored
from shoal.tier.streams import PinnedRing, download_buffers
from shoal.zero.grad_accumulator import Pool
from tests.late.device import load, queued
from tests.late.ranks import prepare

WIDTH = 256
UNIT = WIDTH * WIDTH * 4
"""Bytes of a unit."""
ROWS = 40_000
"""Of a batch whose saved tensors are large enough to be moved."""


def _growth(stage: int, layers: int, waits: bool = False) -> tuple[float, float]:
    """Return by how many units the device's memory grows in an evaluation, and in a pass of training.

    A host that `waits` does so after each layer, forward and backward, so that it is never ahead.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    on_host = {"device": "cpu"}
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_param": on_host,
                              "offload_optimizer": on_host, "stage3_prefetch_bucket_size": WIDTH * WIDTH}})[0]
    x = torch.randn(2, WIDTH, device=engine.device).requires_grad_()
    for layer in model if waits else ():
        layer.register_forward_hook(lambda *_: torch.accelerator.synchronize())
        layer.register_full_backward_hook(lambda *_: torch.accelerator.synchronize())
    found = []
    for training in (False, True):
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        before = torch.accelerator.memory_reserved()
        with torch.set_grad_enabled(training):
            out = engine(x)
            if training:
                engine.backward(out.square().mean())
        found.append((torch.accelerator.memory_reserved() - before) / UNIT)
        if training:
            engine.step()
    engine.destroy()
    return found[0], found[1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_of_a_pass_does_not_grow_with_the_model(stage: int, ranks: int) -> None:
    """The host is a whole pass ahead: it waits for nothing in it."""
    with ranks_on(prepare):
        few, many = (run_ranks(ranks, _growth, stage, layers) for layers in (12, 24))
    for (forward, training), (longer_forward, longer_training) in zip(few, many, strict=True):
        assert longer_forward < 2.5 and abs(longer_forward - forward) < 0.1  # the window is one unit beside the present one
        assert longer_training < training + 0.5


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_host_that_is_ahead_takes_no_more_memory_than_one_that_waits(stage: int, ranks: int) -> None:
    with ranks_on(prepare):
        assert run_ranks(ranks, _growth, stage, 24) == run_ranks(ranks, _growth, stage, 24, True)


def _overwritten() -> list[float]:
    device = load()
    buffer = elastic(1024, torch.float32, range(1024), device, Memory(device=torch.device("cpu"), pinned=device), "weights")
    buffer.shard.fetch().wait()
    buffer.shard.tensor.fill_(1)
    buffer.shrink()
    buffer.grow().wait()
    buffer.shard.fetch().wait()
    buffer.shard.tensor.fill_(2)  # a step on the host, while the copy of the weights may be queued
    return [buffer.full.min().item(), buffer.full.max().item()]


def test_a_step_on_the_host_waits_for_copies_of_the_weights() -> None:
    with ranks_on(prepare):
        assert run_ranks(1, _overwritten) == [[1.0, 1.0]]


class _Scaled(nn.Module):
    """A layer whose scale is whole numbers, beside a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor([1, 2, 3, 4], dtype=torch.int32), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def _on_device(stage: int) -> list[str]:
    model = _Scaled()
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "zero_optimization": {"stage": stage}})[0]
    engine.backward(engine(torch.ones(2, 4, device=engine.device)).sum())
    engine.step()
    return [parameter.device.type for parameter in (model.scale, model.empty)]


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_no_unit_has_are_on_the_device(stage: int) -> None:
    with ranks_on(prepare):
        assert run_ranks(1, _on_device, stage) == [["late", "late"]]


def _across_streams() -> float:
    device = load()
    pool, work = Pool(device), torch.Stream(device)
    lent = pool.borrow(1024, torch.float32)
    with work:
        lent.fill_(1)
        total = lent.sum()
        pool.give_back(lent)
    again = pool.borrow(1024, torch.float32)
    again.fill_(2)
    torch.accelerator.current_stream().synchronize()
    return total.item()


def test_a_pool_lends_to_another_stream_what_the_first_has_left() -> None:
    with ranks_on(prepare):
        assert run_ranks(1, _across_streams) == [1024]


def _inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 8, generator=torch.Generator().manual_seed(step)) for step in range(3)]


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])


def _plain() -> list[float]:
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for x in _inputs():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.double().sum().item() for parameter in model.parameters()]


def _in_a_stream(where: str) -> list[float]:
    """Return the weights after steps on the host, within a stream of the script if on the device."""
    model, on_host = _layers(), {"device": "cpu"}
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": on_host,
                              **({"offload_param": on_host} if where == "host" else {})}})[0]
    inputs = [x.to(engine.device) for x in _inputs()]
    torch.accelerator.synchronize()
    with torch.Stream(engine.device):
        for x in inputs:
            engine.backward(engine(x).square().mean())
            engine.step()
        with shoal.gathered(model):
            return [parameter.double().sum().item() for parameter in model.parameters()]


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_training_within_a_stream_steps_in_that_stream(where: str) -> None:
    with ranks_on(prepare):
        assert run_ranks(1, _in_a_stream, where) == [pytest.approx(_plain(), rel=1e-4)]


def _through_a_ring() -> bool:
    device = load()
    ring, sizes = PinnedRing(device, slots=2, size=4096), (0, 4, 4096, 50_000)
    sources = [torch.arange(size, device=device, dtype=torch.int32) * 3 for size in sizes]
    targets = [torch.zeros(size, dtype=torch.int32) for size in sizes]
    for source, target in zip(sources, targets, strict=True):
        ring.download(source, target)
    ring.finish()
    return all(torch.equal(target, torch.arange(len(target), dtype=torch.int32) * 3) for target in targets)


def test_any_host_memory_gets_what_goes_through_a_pinned_ring() -> None:
    with ranks_on(prepare):
        assert run_ranks(1, _through_a_ring) == [True]


def _from_a_disk(folder: str) -> tuple[int, bool]:
    """Return the tasks that a device has yet to run when the host has waited for weights from a disk, and their values."""
    device, expected = load(), torch.arange(5000, dtype=torch.float32)
    buffer = elastic(5000, torch.float32, range(5000), device, Disk(swap=Swap(folder), granule=1024), "weights")
    buffer.shard.fetch(fresh=True).wait()
    buffer.shard.tensor.copy_(expected)
    buffer.shard.commit().wait()
    buffer.shrink()
    torch.accelerator.synchronize()
    busy = torch.ones(4, device=device) * 2
    buffer.grow().wait()
    behind = queued()
    return behind, torch.equal(buffer.full.cpu(), expected) and busy.sum().item() == 8


def test_the_host_waits_for_a_disk_and_not_for_the_copy(tmp_path: Path) -> None:
    with ranks_on(prepare):
        [(behind, right)] = run_ranks(1, _from_a_disk, str(tmp_path))
    assert behind >= 2 + 5 and right, "what was computed, and the copy of each chunk"


def _to_a_disk(folder: str) -> tuple[int, list[float], int]:
    """Return the tasks that a device has yet to run when gradients go to a disk, what arrives, and the buffers there are."""
    device, store = load(), Disk(swap=Swap(folder), granule=1024)
    spans = [mirrored(device, store, size, torch.float32, "gradient") for size in (3000, 5000, 4000, 5000)]
    for step in range(3):
        for value, (span, _) in enumerate(spans):
            span.fetch(fresh=True).wait()
            torch.accelerator.synchronize()
            span.tensor.fill_(10 * step + value)
            span.commit()
            behind = queued()
    arrived: list[float] = []
    for _, rest in spans:
        rest.fetch().wait()
        arrived += [rest.tensor.min().item(), rest.tensor.max().item()]
        rest.commit(changed=False)
    return behind, arrived, len(download_buffers(device)._free)


def test_what_goes_to_a_disk_holds_up_no_thread(tmp_path: Path) -> None:
    with ranks_on(prepare):
        [(behind, arrived, buffers)] = run_ranks(1, _to_a_disk, str(tmp_path))
    assert behind >= 2, "the last gradient, and its copy"
    assert arrived == [20, 20, 21, 21, 22, 22, 23, 23]
    assert buffers == 3, "of the copies that are under way at a time"


def _behind(gradients: str, activations: str, folder: str) -> list[int]:
    """Return the tasks that a device has yet to run after a forward, and after its backward."""
    more = {"activation_checkpointing": {"rest": activations, "nvme_path": folder}}
    zero = {"stage": 2, "offload_optimizer": {"device": gradients, "nvme_path": folder}}
    engine = shoal.initialize(model=_layers(), config={
        "train_micro_batch_size_per_gpu": 2, "log_level": "error", "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.05, "zero_optimization": zero, **more})[0]
    x, found = torch.ones(ROWS, 8, device=engine.device), list[int]()
    for _ in range(2):
        torch.accelerator.synchronize()
        loss = engine(x).square().mean()
        found = [queued()]
        engine.backward(loss)
        found.append(queued())
        engine.step()
    engine.destroy()
    return found


@pytest.mark.parametrize(("gradients", "activations"), [("nvme", "device"), ("cpu", "nvme")])
def test_a_host_with_a_disk_is_as_far_ahead_as_one_without(gradients: str, activations: str, tmp_path: Path) -> None:
    """Where copies end in page-locked memory, it waits for the oldest of three under way."""
    with ranks_on(prepare):
        [without] = run_ranks(1, _behind, "cpu", "cpu" if activations == "nvme" else "device", str(tmp_path))
        [found] = run_ranks(1, _behind, gradients, activations, str(tmp_path))
    assert all(here >= there for here, there in zip(found, without, strict=True))


def _loaded(folder: str, stage: int) -> list[bool]:
    """Return whether an evaluation before a load, and one after it, have the weights of their time."""
    model, on_host = _layers(), {"device": "cpu"}
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "log_level": "error",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_param": on_host,
                              "offload_optimizer": on_host}})[0]
    x = _inputs()[0].to(engine.device)

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return engine(x)

    first = evaluate().cpu()
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    engine.backward(engine(x).square().sum())
    engine.step()
    second = evaluate().cpu()
    late = evaluate()  # copies of its weights may be queued, which the load overwrites where they rest
    engine.load_checkpoint(folder)
    return [torch.equal(late.cpu(), second), torch.equal(evaluate().cpu(), first)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_load_waits_for_copies_of_the_weights(stage: int, ranks: int, tmp_path: Path) -> None:
    with ranks_on(prepare):
        assert run_ranks(ranks, _loaded, str(tmp_path), stage) == [[True, True]] * ranks


def _outlives_its_owner() -> bool:
    device = load()
    span, rest = mirrored(device, Memory(device=torch.device("cpu"), pinned=device), 1024, torch.float32, "gradient")
    span.fetch(fresh=True).wait()
    span.commit()
    left = ref(span)
    del span, rest
    gc.collect()
    return left() is not None


def test_a_copy_under_way_does_not_keep_what_it_reads() -> None:
    with ranks_on(prepare):
        assert run_ranks(1, _outlives_its_owner) == [False]
