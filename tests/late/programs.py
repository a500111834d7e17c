"""Small programs that between them depend on every wait of `tests.late.faults`; each returns numbers to compare.

`numbers` runs one on whatever device its rank has; `first_wrong` runs it with several seeds, with or without a fault.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import shoal
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.rank_file import Staging
from shoal.device import HOST, DeviceStream, can_pin, current_device, new_stream, synchronize
from shoal.errors import RanksDisagree
from shoal.pipeline.wire import Wire
from shoal.tensor_parallel import Plan, parallelize
from shoal.tensor_parallel.axis import Axis
from shoal.tier import Memory, elastic
from shoal.tier.device_mirror import mirrored
from shoal.tier.streams import PinnedRing, UploadRing, free, h2d_stream
from shoal.transport.collectives import Communicator, Label
from shoal.transport.failure_board import FailureBoard
from tests.late.device import NAME, seed
from tests.late.faults import FAULTS, plant
from tests.late.group import BACKEND
from tests.pipeline import small
from tests.tensor_parallel import test_plan

__all__ = ["PROGRAMS", "FaultRaised", "Program", "first_wrong", "numbers"]

WIDTH, LAYERS, STEPS = 48, 4, 3
ON_HOST = {"device": "cpu"}


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])


def _batch(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(dtype)


@dataclass(frozen=True, kw_only=True)
class _Training:
    """Training by an engine: the weights at the end, and the losses."""

    zero: dict[str, Any]
    more: dict[str, Any]
    on_disk: bool = False
    saves: bool = False
    reads: bool = False
    """Whether the script reads the weights between backward and the step."""

    def __call__(self) -> list[Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            shared: list[str] = [folder]
            dist.broadcast_object_list(shared, 0, device=torch.device("cpu"))
            return self._train(folder, shared[0])

    def _config(self, folder: str) -> dict[str, Any]:
        disk = {"device": "nvme", "nvme_path": folder, "buffer_count": 4}
        zero = {**self.zero, **({"offload_param": disk, "offload_optimizer": disk} if self.on_disk else {})}
        return {"train_micro_batch_size_per_gpu": 3, "log_level": "error", "timeout": 30,
                "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}, "zero_optimization": zero, **self.more}

    def _train(self, folder: str, shared: str) -> list[Tensor]:
        torch.manual_seed(0)
        engine = shoal.initialize(model=_layers(), config=self._config(folder))[0]
        dtype = torch.bfloat16 if "bf16" in self.more else torch.float32
        losses: list[Tensor] = []
        for step in range(STEPS * engine.gradient_accumulation_steps()):
            if self.saves and step == STEPS - 1:
                engine.save_checkpoint(shared)
            loss = engine(_batch(step, dtype).to(engine.device)).float().square().mean()
            engine.backward(loss)
            losses += [parameter.detach().sum() for parameter in engine.module.parameters() if self.reads]
            engine.step()
            losses.append(loss.detach())
        if self.saves:
            engine.load_checkpoint(shared)
        weights = engine.consolidated_state_dict(torch.float32) or {}
        engine.destroy()
        return [*(loss.cpu() for loss in losses), *(weight.cpu() for weight in weights.values())]


def _pipeline() -> list[Tensor]:
    result = small.train(small.Case(stages=2, schedule="1f1b", clipping=0.0), steps=2)
    return [torch.tensor(result.losses), *(weight.cpu() for weight in result.weights.values())]


def _tensor_parallel() -> list[Tensor]:
    torch.manual_seed(0)
    group = dist.new_group(backend=None)
    assert isinstance(group, dist.ProcessGroup)
    model = parallelize(test_plan.model(), group, Plan(test_plan.PLAN, sequence_dim=1)).to(current_device())
    tokens = torch.randint(test_plan.WORDS, (2, 8), generator=torch.Generator().manual_seed(1)).to(current_device())
    loss = functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach().cpu(), *(grad.cpu() for grad in grads)]


def _host() -> Memory:
    return Memory(device=HOST, pinned=current_device() if can_pin(current_device()) else None)


def _written_on_host() -> list[Tensor]:
    """Weights on the host are copied to the device, and a step on the host overwrites them."""
    buffer = elastic(1024, torch.float32, range(1024), current_device(), _host(), "weights")
    found: list[Tensor] = []
    for value in range(3):
        buffer.shard.fetch().wait()
        buffer.shard.tensor.fill_(value)
        buffer.shrink()
        buffer.grow().wait()
        found.append(buffer.full.clone())
    return [each.cpu() for each in found]


def _mirror_written_on_host() -> list[Tensor]:
    """A span that is mirrored on the device goes up, and the host overwrites it."""
    span, rest = mirrored(current_device(), _host(), 1024, torch.float32, "gradient")
    found: list[Tensor] = []
    for value in range(3):
        rest.fetch().wait()
        rest.tensor.fill_(value)
        rest.commit()
        span.fetch().wait()
        found.append(span.tensor.clone())
        rest.fetch().wait()
        rest.tensor.fill_(-1)
        span.commit(changed=False)
    return [each.cpu() for each in found]


def _mirror_brought_back() -> list[Tensor]:
    """A span of the device goes down to the host, and comes back at once."""
    span, _ = mirrored(current_device(), _host(), 1024, torch.float32, "gradient")
    found: list[Tensor] = []
    for value in range(3):
        span.fetch(fresh=True).wait()
        span.tensor.fill_(value)
        span.commit()
        span.fetch().wait()
        found.append(span.tensor.clone())
        span.commit(changed=False)
    return [each.cpu() for each in found]


def _mirror_freed_unused() -> list[Tensor]:
    """A span is brought to the device and given up unused; what then has its memory keeps what it is given."""
    span, rest = mirrored(current_device(), _host(), 1024, torch.float32, "gradient")
    found: list[Tensor] = []
    for value in range(3):
        rest.fetch().wait()
        rest.tensor.fill_(-1)
        rest.commit()
        span.fetch()
        span.commit(changed=False)
        other = torch.full((1024,), float(value), device=current_device())
        synchronize(current_device())
        found.append(other)
    return [each.cpu() for each in found]


def _staged() -> list[Tensor]:
    """A checkpoint's pieces are staged, and read on the host."""
    weights = torch.ones(4096, device=current_device()) * 3
    piece = Piece(name="weights", shape=(4096,), start=0, stop=4096, data=weights)
    staged = Staging().copy([piece], 1 << 20)
    return [torch.frombuffer(bytearray(b"".join(file.data)), dtype=torch.float32).clone() for file in staged.files]


def _staged_and_released() -> list[Tensor]:
    """A checkpoint's piece is released once it is staged, and its memory is another's."""
    weights = torch.ones(4096, device=current_device()) * 3

    @contextmanager
    def hold(changed: bool) -> Iterator[None]:
        yield
        free(weights)

    piece = Piece(name="weights", shape=(4096,), start=0, stop=4096, data=weights, hold=hold)
    return [torch.frombuffer(bytearray(b"".join(file.data)), dtype=torch.float32).clone()
            for file in Staging().copy([piece], 1 << 20).files]


def _through_a_ring() -> list[Tensor]:
    """Results that nobody keeps go through a ring, whose slots are fewer than they need."""
    device = current_device()
    ring, targets = PinnedRing(device, slots=2, size=4096), [torch.zeros(4096) for _ in range(3)]
    for value, target in enumerate(targets):
        ring.download(torch.ones(4096, device=device) * (value + 1), target)
        torch.full((4096,), -1.0, device=device)
    ring.finish()
    return targets


def _up_through_a_ring() -> list[Tensor]:
    """Host memory that is overwritten at once goes up through a ring, whose slots are fewer than it needs."""
    device = current_device()
    ring, source = UploadRing(device, slots=2, size=4096), torch.zeros(2500)
    targets = [torch.zeros(2500, device=device) for _ in range(3)]
    after = h2d_stream(device).record_compute()
    for value, target in enumerate(targets):
        source.fill_(value + 1)
        event = ring.send(source, target, after)
    source.fill_(-1)
    event.synchronize()
    return [target.cpu() for target in targets]


def _dropped_under_a_copy() -> list[Tensor]:
    """Weights are on their way to the device, and their buffer is dropped; what has its memory keeps what it is given."""
    device = current_device()
    buffer = elastic(1024, torch.float32, range(1024), device, _host(), "weights")
    buffer.shrink()
    buffer.grow()
    del buffer
    other = torch.full((1024,), 5.0, device=device)
    synchronize(device)
    return [other.cpu()]


def _dropped_under_its_copy_down() -> list[Tensor]:
    """A span of the device is dropped while it goes down: what goes down is what it had."""
    device = current_device()
    span, rest = mirrored(device, _host(), 1024, torch.float32, "gradient")
    below = rest.tensor
    span.fetch(fresh=True).wait()
    span.tensor.fill_(3)
    span.commit()
    del span, rest
    torch.full((1024,), 5.0, device=device)
    synchronize(device)
    return [below.clone()]


def _after_a_backward_that_steps() -> shoal.Engine:
    config = _Training(zero={"stage": 2, "offload_optimizer": _IN_BACKWARD}, more=_BF16)._config("")
    engine = shoal.initialize(model=_layers(), config={**config, "gradient_clipping": 0.0})[0]
    engine.backward(engine(_batch(0, torch.bfloat16).to(engine.device)).float().square().mean())
    return engine


def _dropped_in_backward() -> list[Tensor]:
    """An engine is dropped after a backward that has stepped; what has its memory keeps what it is given."""
    engine, device = _after_a_backward_that_steps(), current_device()
    assert engine.sharded is not None and engine.optimizer is not None
    engine.optimizer.finish_deferred_steps()
    sizes = [unit.full.numel() for unit in engine.sharded.units]
    del engine
    gc.collect()
    others = [torch.full((size,), 5.0, dtype=torch.bfloat16, device=device) for size in sizes]
    synchronize(device)
    return [other.cpu() for other in others]


def _destroyed_in_backward() -> list[Tensor]:
    """An engine is destroyed between a backward that has stepped and the step: the model has the stepped weights."""
    engine = _after_a_backward_that_steps()
    model = engine.module
    engine.destroy()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def _issued_in_other_orders() -> list[Tensor]:
    """Ranks give the device two collectives of one size in different orders: 1 where the step says so."""
    group = dist.new_group(backend=BACKEND)
    assert isinstance(group, dist.ProcessGroup)
    communicator, device = Communicator(group, timeout=30), current_device()
    labels = [Label(kind="gather", unit=name, index=communicator.register()) for name in ("first", "second")]
    for label in labels if communicator.rank == 0 else labels[::-1]:
        communicator.all_gather(torch.ones(64, device=device), label).wait()
    synchronize(device)
    try:
        communicator.gather_step_words(torch.zeros(1, dtype=torch.int64))
    except RanksDisagree:
        return [torch.ones(1)]
    return [torch.zeros(1)]


_names = (f"abandoned {number}" for number in count())


def _abandoned() -> list[Tensor]:
    """A rank fails before a collective of a data axis that the other has given its device."""
    group = _group_of_seconds()
    communicator = Communicator(group, timeout=5)
    label = Label(kind="gather", unit="first", index=communicator.register())
    return _heard_within(group, lambda whole: communicator.all_gather(whole, label).wait())


def _abandoned_by_a_tensor_rank() -> list[Tensor]:
    """A rank fails before a collective of a tensor axis that the other has given its device."""
    group = _group_of_seconds()
    axis = Axis(group)
    return _heard_within(group, lambda whole: axis.all_reduce(whole).wait())


def _abandoned_in_a_broadcast() -> list[Tensor]:
    """A rank fails before the broadcast that the other has given its device."""
    group = _group_of_seconds()
    communicator = Communicator(group, timeout=5)
    return _heard_within(group, lambda whole: communicator.broadcast(whole, 1, "weights"))


def _abandoned_by_a_sender() -> list[Tensor]:
    """A rank fails before it sends the message that the other has its device receive."""
    group = _group_of_seconds()
    wire = Wire(group, 1 - dist.get_rank(group), 0, current_device())
    return _heard_within(group, lambda whole: wire.receive([whole], 0).wait())


def _abandoned_by_a_collector() -> list[Tensor]:
    """A rank fails before it sends the part of the state dict that the other, in a group without gloo, has awaited."""
    group = dist.new_group(backend=NAME, timeout=timedelta(seconds=5))
    assert isinstance(group, dist.ProcessGroup)
    communicator = Communicator(group, timeout=5)
    return _heard_within(group, lambda _: communicator.gather_to_first(None, {1: ((64,), torch.float32)}))


def _group_of_seconds() -> dist.ProcessGroup:
    group = dist.new_group(backend=BACKEND, timeout=timedelta(seconds=5))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _heard_within(group: dist.ProcessGroup, collective: Callable[[Tensor], object]) -> list[Tensor]:
    """Have rank 1 of `group` fail before `collective`: 1 where rank 0 hears why.

    Rank 0 is blocked in a read of the device, outside every wait of Shoal.
    """
    name = next(_names)
    board, store = FailureBoard(name), dist.distributed_c10d._get_default_store()
    if dist.get_rank(group) == 1:
        board.publish("rank 1: out of memory")
        store.wait([name])
        return [torch.ones(1)]
    whole, heard = torch.ones(64, device=current_device()), 0.0
    try:
        collective(whole)
        whole.cpu()
        collective(whole)
    except RuntimeError as error:
        heard = float("out of memory" in str(error))
    store.set(name, "")
    return [torch.full((1,), heard)]


def _side_streams(count: int) -> list[DeviceStream | None]:
    """Return streams of the device; None where it is the host."""
    return [new_stream(current_device()) for _ in range(count)]


@contextmanager
def _in_turn(stream: DeviceStream | None) -> Generator[None]:
    """Compute in `stream`, after what was given to the device before, and before what is given to it later."""
    if stream is None:
        yield
        return
    stream.wait_for_current()
    with stream.use():
        yield
    stream.record().stream_wait()


def _in_several_streams() -> list[Tensor]:
    """A script gives forward, backward and the step to a stream each: what one has allocated, another one uses."""
    engine = shoal.initialize(model=_layers(), config={
        "train_micro_batch_size_per_gpu": 3, "log_level": "error", "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": ON_HOST}})[0]
    forward, backward, stepping = _side_streams(3)
    losses: list[Tensor] = []
    for step in range(STEPS):
        x = _batch(step, torch.float32).to(engine.device)
        with _in_turn(forward):
            losses.append(engine(x).square().mean())
        with _in_turn(backward):
            engine.backward(losses[-1])
        with _in_turn(stepping):
            engine.step()
    weights = engine.consolidated_state_dict(torch.float32) or {}
    engine.destroy()
    return [*(loss.detach().cpu() for loss in losses), *(weight.cpu() for weight in weights.values())]


def _gathered_in_two_streams() -> list[Tensor]:
    """Weights that one stream has gathered are read in another one, which does not follow it."""
    engine = shoal.initialize(model=_layers(), config={
        "train_micro_batch_size_per_gpu": 3, "log_level": "error",
        "zero_optimization": {"stage": 0, "offload_param": ON_HOST}})[0]
    with torch.no_grad():
        engine(_batch(0, torch.float32).to(engine.device))  # releases the weights
    synchronize(current_device())
    contexts = [nullcontext() if stream is None else stream.use() for stream in _side_streams(2)]
    with ExitStack() as outer:
        with contexts[0]:
            outer.enter_context(shoal.gathered(engine.module))
        with contexts[1], shoal.gathered(engine.module):
            found = [parameter.detach().square().sum() for parameter in engine.module.parameters()]
    synchronize(current_device())
    engine.destroy()
    return [each.cpu() for each in found]


def _saved_in_a_stream() -> list[Tensor]:
    """A script trains in a stream of its own, and saves there: a thread writes what the device may not have computed yet."""
    engine = shoal.initialize(model=_layers(), config={
        "train_micro_batch_size_per_gpu": 3, "log_level": "error", "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 2}, "checkpoint": {"async_save": False}})[0]
    x = _batch(0, torch.float32).to(engine.device)
    [stream] = _side_streams(1)
    with tempfile.TemporaryDirectory() as folder, _in_turn(stream):
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        found = [parameter.detach().cpu() for parameter in engine.module.parameters()]
    engine.destroy()
    return found


def _loaded() -> list[Tensor]:
    """A checkpoint is loaded into weights on the host whose copies an evaluation has queued."""
    model = _layers()
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 3, "log_level": "error", "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": ON_HOST,
                              "offload_optimizer": ON_HOST}})[0]
    x = _batch(0, torch.float32).to(engine.device)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        engine.wait_for_checkpoint()
        engine.backward(engine(x).square().mean())
        engine.step()
        synchronize(current_device())
        with torch.no_grad():
            late = engine(x)
        engine.load_checkpoint(folder)
        found = late.cpu()
    engine.destroy()
    return [found]


def _gradients_read() -> list[Tensor]:
    """A script reads gradients whose sum is replicated, before the step."""
    model = _layers()
    config = {"train_micro_batch_size_per_gpu": 3, "log_level": "error", "zero_optimization": {"stage": 0},
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = shoal.initialize(model=model, config=config)[0]
    engine.backward(engine(_batch(0, torch.float32).to(engine.device)).square().mean())
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    grads = [each.cpu() for each in found]
    engine.step()
    engine.destroy()
    return grads


class FaultRaised(Exception):
    """A program raised under a planted fault, with this seed."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program, and the ranks that it needs."""

    ranks: int
    run: Callable[[], list[Tensor]]
    has_host_numbers: bool = True
    """Whether it also runs where the device is the host."""


def _training(ranks: int, zero: dict[str, Any], *, on_disk: bool = False, saves: bool = False, reads: bool = False,
              **more: Any) -> Program:
    zero = {"stage3_param_persistence_threshold": 0, **zero} if zero["stage"] == 3 else zero
    return Program(ranks=ranks, run=_Training(zero=zero, more=more, on_disk=on_disk, saves=saves, reads=reads))


_BF16: dict[str, Any] = {"bf16": {"enabled": True, "check_grad_overflow": False}}
_IN_BACKWARD: dict[str, Any] = {**ON_HOST, "step_in_backward": True}

PROGRAMS: dict[str, Program] = {
    "sharded": _training(2, {"stage": 3}),
    "replicated": _training(2, {"stage": 0}),
    "offloaded": _training(2, {"stage": 3, "offload_param": ON_HOST, "offload_optimizer": ON_HOST}),
    "published and offloaded": _training(2, {"stage": 1, "offload_param": ON_HOST}),
    "on disk": _training(1, {"stage": 3}, on_disk=True),
    "stepped on the host": _training(2, {"stage": 2, "offload_optimizer": ON_HOST}, **_BF16),
    "read before a step on the host": _training(2, {"stage": 2, "offload_optimizer": ON_HOST}, reads=True,
                                               gradient_clipping=0.0, **_BF16),
    "stepped in backward": _training(2, {"stage": 2, "offload_optimizer": _IN_BACKWARD}, gradient_clipping=0.0, **_BF16),
    "accumulated off the device": _training(2, {"stage": 2, "offload_optimizer": ON_HOST}, gradient_accumulation_steps=2),
    "saved": _training(2, {"stage": 3}, saves=True, checkpoint={"async_save": True}),
    "replicas": _training(4, {"stage": 2, "mics_shard_size": 2}),
    "replicas stepped on the host": _training(4, {"stage": 2, "mics_shard_size": 2, "offload_optimizer": ON_HOST}),
    "compressed": _training(2, {"stage": 1}, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 1}}),
    "sharded on disk": _training(2, {"stage": 3}, on_disk=True),
    "staged": Program(ranks=1, run=_staged),
    "staged and released": Program(ranks=1, run=_staged_and_released),
    "through a ring": Program(ranks=1, run=_through_a_ring),
    "up through a ring": Program(ranks=1, run=_up_through_a_ring),
    "dropped under a copy": Program(ranks=1, run=_dropped_under_a_copy),
    "dropped under its copy down": Program(ranks=1, run=_dropped_under_its_copy_down),
    "dropped in backward": Program(ranks=1, run=_dropped_in_backward),
    "destroyed in backward": Program(ranks=1, run=_destroyed_in_backward),
    "issued in other orders": Program(ranks=2, run=_issued_in_other_orders, has_host_numbers=False),
    "abandoned": Program(ranks=2, run=_abandoned, has_host_numbers=False),
    "abandoned by a tensor rank": Program(ranks=2, run=_abandoned_by_a_tensor_rank, has_host_numbers=False),
    "in several streams": Program(ranks=2, run=_in_several_streams),
    "gathered in two streams": Program(ranks=1, run=_gathered_in_two_streams),
    "abandoned in a broadcast": Program(ranks=2, run=_abandoned_in_a_broadcast, has_host_numbers=False),
    "abandoned by a collector": Program(ranks=2, run=_abandoned_by_a_collector, has_host_numbers=False),
    "abandoned by a sender": Program(ranks=2, run=_abandoned_by_a_sender, has_host_numbers=False),
    "saved in a stream": Program(ranks=1, run=_saved_in_a_stream),
    "loaded": Program(ranks=1, run=_loaded),
    "gradients read": Program(ranks=2, run=_gradients_read),
    "pipeline": Program(ranks=2, run=_pipeline),
    "tensor parallel": Program(ranks=2, run=_tensor_parallel),
    "written on the host": Program(ranks=1, run=_written_on_host),
    "a mirror brought back": Program(ranks=1, run=_mirror_brought_back),
    "a mirror freed unused": Program(ranks=1, run=_mirror_freed_unused),
    "a mirror written on the host": Program(ranks=1, run=_mirror_written_on_host),
}


def numbers(name: str) -> list[Tensor]:
    """Run a program once."""
    return PROGRAMS[name].run()


def first_wrong(name: str, right: Sequence[list[Tensor]], seeds: Sequence[int], fault: str | None = None) -> int | None:
    """Run a program with each of `seeds` until a rank has other bits than `right`; return that seed.

    A program that raises under a planted fault ends its rank with `FaultRaised`.
    """
    if fault is not None:
        plant(next(each for each in FAULTS if each.name == fault))
    rank, host_group = dist.get_rank(), dist.new_group(backend="gloo")
    for number in seeds:
        seed(number and number * 1000 + rank)
        try:
            found = PROGRAMS[name].run()
            torch.accelerator.synchronize()
        except Exception as error:
            raise error if fault is None else FaultRaised(number) from error
        same = len(found) == len(right[rank]) and all(map(torch.equal, found, right[rank]))
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, same, group=host_group)
        if not all(answers):
            return number
    return None
