"""A step within backward: when it begins, the bytes that it saves, and the calls that are refused before `step` ends it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.compat.parameters import safe_set_full_fp32_param
from shoal.engine.schema import Config
from shoal.errors import ConfigError, TierError, UsageError
from shoal.optim.step_scheduler import began_in_backward
from shoal.testing import run_ranks

from .test_lost import logged

WIDTH = 64
DISK: dict[str, Any] = {"device": "nvme", "buffer_count": 2}
MEMORY: dict[str, Any] = {"offload_optimizer": {}}
ON_HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
ALL: dict[str, Any] = {"offload_optimizer": DISK, "offload_param": DISK}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Detached(Block):
    """Reads its weight detached from the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x @ self.layer.weight.detach()))


class InPart(Block):
    """Recomputes a part of itself in a nested backward, after the rest of its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(checkpoint(self.layer, x, use_reentrant=True))


class Failing(Block):
    """Raises in backward, before its own gradient is there, while `fails`."""

    fails = True

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self.fail)
        return y

    def fail(self, gradient: Tensor) -> None:
        if self.fails:
            raise RuntimeError("the middle of backward")


class Stack(nn.Module):
    """A layer of the root, and blocks, the first two of which are of another kind."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([kind(), kind(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def model_of(kind: type[Block] = Block) -> nn.Module:
    torch.manual_seed(0)
    return Stack(kind)


def config(folder: str, tier: dict[str, Any], stage: int = 3, *, within: bool = True, **more: Any) -> dict[str, Any]:
    placed = {key: {**block, "nvme_path": folder} for key, block in tier.items()}
    placed["offload_optimizer"]["step_in_backward"] = within
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "timeout": 20,
            "zero_optimization": {"stage": stage, **placed}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **more}


def engine_of(folder: str, tier: dict[str, Any], stage: int = 3, *, model: nn.Module | None = None, within: bool = True,
              **more: Any) -> shoal.Engine:
    return shoal.initialize(model=model or model_of(), config=config(folder, tier, stage, within=within, **more))[0]


def loss_of(engine: shoal.Engine, number: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(10 * number + engine.global_rank)
    return engine(torch.randn(2, WIDTH, generator=random)).pow(2).mean()


def stepped(engine: shoal.Engine) -> list[bool]:
    assert engine.sharded is not None
    return [began_in_backward(unit) for unit in engine.sharded.trainable]


def weights(engine: shoal.Engine) -> list[Tensor]:
    return list((engine.consolidated_state_dict() or {}).values())


# When a unit is stepped


def begins(folder: str, tier: dict[str, Any], stage: int) -> None:
    engine = engine_of(folder, tier, stage, gradient_accumulation_steps=2)
    for number in range(4):
        engine.backward(loss_of(engine, number))
        assert stepped(engine) == [number % 2 == 1] * 5, "at the boundary, and every unit"
        engine.step()
        assert not any(stepped(engine))
    loss_of(engine).backward()
    assert not any(stepped(engine)), "loss.backward() may be another engine's"
    engine.destroy()


@pytest.mark.parametrize("tier", [MEMORY, ON_HOST, ALL], ids=["memory", "host", "disk"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_backward_at_a_boundary_steps_every_unit(stage: int, tier: Any, tmp_path: Path) -> None:
    run_ranks(2, begins, str(tmp_path), tier, stage)


def other_ways(folder: str, tier: dict[str, Any], stage: int, within: bool) -> list[Tensor]:
    """Mix passes that do not step with passes that do."""
    engine = engine_of(folder, tier, stage, gradient_accumulation_steps=2, within=within)
    with engine.no_sync():
        engine.backward(loss_of(engine, 0))
    engine.step()
    engine.backward(loss_of(engine, 1))
    engine.step()
    for number in range(2):
        engine.scale(loss_of(engine, 2 + number)).backward()
        engine.step()
    engine.backward(loss_of(engine, 4))
    engine.step()
    engine.backward(loss_of(engine, 5), allreduce_gradients=False)
    engine.step()
    with torch.no_grad():
        loss_of(engine)
    engine.backward(loss_of(engine, 6))
    engine.step()
    engine.backward(loss_of(engine, 7))
    assert any(stepped(engine)) == within
    engine.step()
    found = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("tier", [MEMORY, ALL], ids=["memory", "disk"])
@pytest.mark.parametrize("stage", range(4))
def test_passes_that_step_and_passes_that_do_not_mix(stage: int, tier: Any, tmp_path: Path) -> None:
    plain, found = (run_ranks(2, other_ways, str(tmp_path), tier, stage, within)[0] for within in (False, True))
    assert len(plain) == 6 and all(map(torch.equal, plain, found))


def through_another(folder: str, within: bool) -> list[Tensor]:
    """Train a model through a second engine, whose own gradients are then discarded."""
    first, second = (engine_of(folder, MEMORY, 2, within=within) for _ in range(2))
    for number in range(3):
        torch.manual_seed(number)
        first.backward(second(first(torch.randn(2, WIDTH))).pow(2).mean())
        assert not any(stepped(second)) and any(stepped(first)) == within
        first.step()
        second.zero_grad()
        second.backward(loss_of(second, number))
        second.step()
    return weights(first) + weights(second)


def test_the_backward_of_another_engine_steps_no_unit(tmp_path: Path) -> None:
    plain, found = (run_ranks(1, through_another, str(tmp_path), within)[0] for within in (False, True))
    assert all(map(torch.equal, plain, found))


# Bytes that it saves


def moved(folder: str, within: bool) -> tuple[float, float]:
    """Return the bytes read and written in an iteration, per element."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    engine = engine_of(folder, ALL, model=model, within=within)
    assert engine.sharded is not None and engine.optimizer is not None
    swap = engine.sharded.storage.swaps[0]

    def iterate() -> None:
        engine.backward(engine(torch.randn(2, 256)).pow(2).mean())
        engine.step()
        engine.optimizer.finish_deferred_steps()
        while swap.writing_bytes:
            pass

    iterate()
    before, elements = (swap.read_bytes, swap.written_bytes), sum(unit.layout.size for unit in engine.sharded.units)
    for _ in range(4):  # weights that a step has left for the next forward are written in it
        iterate()
    found = (swap.read_bytes - before[0]) / 4 / elements, (swap.written_bytes - before[1]) / 4 / elements
    engine.destroy()
    return found


@pytest.mark.host("a gradient on its way from a device to its step is written to disk, and is in memory when it is read")
def test_stepping_in_backward_saves_the_gradient_round_trip_to_disk(tmp_path: Path) -> None:
    read, written = run_ranks(1, moved, str(tmp_path), False)[0]
    assert read <= 24 and abs(written - 16) <= 1, "data that is still being written is not read from the disk"
    read, written = run_ranks(1, moved, str(tmp_path), True)[0]
    assert read <= 16 and abs(written - 12) <= 1


def crowded(folder: str, waiting: int) -> list[Tensor]:
    engine = engine_of(folder, ALL)
    assert engine.optimizer is not None
    engine.optimizer._scheduler._max_waiting_bytes = waiting
    for number in range(3):
        engine.backward(loss_of(engine, number))
        engine.step()
    return weights(engine)


def test_backward_waits_for_steps_when_memory_is_short(tmp_path: Path) -> None:
    plain, found = (run_ranks(1, crowded, str(tmp_path), waiting)[0] for waiting in (1 << 30, 1))
    assert all(map(torch.equal, plain, found))


def resumed(folder: str, first: bool, second: bool) -> tuple[list[Tensor], list[Tensor]]:
    engine = engine_of(folder, ALL, within=first)
    for number in range(2):
        engine.backward(loss_of(engine, number))
        engine.step()
    engine.save_checkpoint(f"{folder}/saved", tag="here")
    other = engine_of(folder, MEMORY, 1, within=second)
    other.load_checkpoint(f"{folder}/saved", tag="here")
    for each in (engine, other):
        for number in range(2, 4):
            each.backward(loss_of(each, number))
            each.step()
    found = weights(engine), weights(other)
    engine.destroy()
    return found


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_checkpoints_are_independent_of_step_in_backward(first: bool, second: bool, tmp_path: Path) -> None:
    straight, again = run_ranks(2, resumed, str(tmp_path), first, second)[0]
    for weight, other in zip(straight, again, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)


# Calls that are refused before `step`


def gather(engine: shoal.Engine) -> None:
    with shoal.gathered(engine.module):
        pass


def step_elsewhere(engine: shoal.Engine) -> None:
    engine.set_gradient_accumulation_boundary(False)
    engine.step()


TOO_SOON: dict[str, tuple[Callable[[shoal.Engine], object], str]] = {
    "a second backward": (lambda engine: engine.backward(torch.zeros((), requires_grad=True)),
                          "backward: backward has begun"),
    "zero_grad": (lambda engine: engine.zero_grad(), "zero_grad: backward has begun"),
    "saving": (lambda engine: engine.save_checkpoint("nowhere"), "save_checkpoint: backward has begun"),
    "loading": (lambda engine: engine.load_checkpoint("nowhere"), "load_checkpoint: backward has begun"),
    "no step": (step_elsewhere, "step within an accumulation: backward has begun"),
    "forward": (loss_of, r"the weights of unit '\S+' were asked for after backward stepped"),
    "gathering": (gather, r"the weights of unit '\S+' were asked for after backward stepped"),
    "exporting": (weights, r"the weights of unit '\S+' were asked for after backward stepped"),
    "writing a master": (lambda engine: safe_set_full_fp32_param(next(engine.module.parameters()), torch.ones(WIDTH, WIDTH)),
                         r"the weights of unit '\S*' were asked for after backward stepped"),
    "another batch size": (lambda engine: engine.set_train_batch_size(4), "called within an accumulation"),
}


def too_soon(folder: str, tier: dict[str, Any], stage: int, within: bool) -> tuple[dict[str, str], list[Tensor]]:
    engine = engine_of(folder, tier, stage, within=within)
    errors: dict[str, str] = {}
    for number, (name, (action, _)) in enumerate(TOO_SOON.items()):
        engine.backward(loss_of(engine, number))
        if within:
            with pytest.raises(UsageError) as raised:
                action(engine)
            errors[name] = str(raised.value)
        engine.progress.override_boundary(None)
        engine.step()
    found = weights(engine)
    engine.destroy()
    return errors, found


@pytest.mark.parametrize(("tier", "stage"), [(MEMORY, 0), (MEMORY, 2), (ALL, 3)])
def test_calls_between_backward_and_step_are_refused_without_harm(tier: Any, stage: int, tmp_path: Path) -> None:
    errors, found = run_ranks(1, too_soon, str(tmp_path), tier, stage, True)[0]
    for name, (_, pattern) in TOO_SOON.items():
        assert re.search(pattern, errors[name]), (name, errors[name])
    assert all(map(torch.equal, found, run_ranks(1, too_soon, str(tmp_path), tier, stage, False)[0][1]))


def swapped(folder: str, stage: int) -> bool:
    found: list[list[Tensor]] = []
    for swaps in (False, True):
        engine = engine_of(folder, MEMORY, stage)
        for number in range(2):
            engine.backward(loss_of(engine, number))
            parameter = next(engine.module.parameters())
            former = parameter.data
            if swaps:
                parameter.data = torch.full_like(former, 7.0)
                with pytest.raises(UsageError, match=r"'first\.weight' was given other memory .* since backward stepped"):
                    engine.step()
                parameter.data = former
            engine.step()
        found.append(weights(engine))
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("stage", range(3))
def test_a_stepped_parameter_with_other_memory_is_refused_by_name(stage: int, tmp_path: Path) -> None:
    assert run_ranks(1, swapped, str(tmp_path), stage) == [True]


def kept(folder: str) -> list[bool]:
    engine = engine_of(folder, MEMORY, 0)
    with pytest.raises(UsageError, match="retain_graph=True keeps a graph whose weights this pass is to step"):
        engine.backward(loss_of(engine), retain_graph=True)
    return stepped(engine)


def test_retain_graph_is_refused_before_any_unit_steps(tmp_path: Path) -> None:
    assert run_ranks(1, kept, str(tmp_path)) == [[False] * 5]


def halfway(folder: str, kind: type[Block], tier: dict[str, Any], stage: int) -> tuple[str, list[str]]:
    engine = engine_of(folder, tier, stage, model=model_of(kind))
    with pytest.raises((UsageError, RuntimeError)) as raised:
        engine.backward(loss_of(engine))
    after: list[str] = []
    for action in (lambda: engine.step(), lambda: engine.save_checkpoint(f"{folder}/saved"),
                   lambda: engine.backward(loss_of(engine))):
        with pytest.raises(TierError) as then:
            action()
        after.append(str(then.value))
    return str(raised.value), after


READ = r"the weights of unit 'blocks\.1' were asked for after backward stepped.*set offload_optimizer.step_in_backward"


@pytest.mark.parametrize(("kind", "expected"), [(Failing, "the middle of backward"), (Detached, READ), (InPart, READ)])
@pytest.mark.parametrize(("tier", "stage"), [(MEMORY, 0), (MEMORY, 3), (ALL, 1), (ALL, 3)])
def test_a_backward_that_fails_or_reads_stepped_weights_ends_the_engine(kind: Any, expected: str, tier: Any, stage: int,
                                                                        tmp_path: Path) -> None:
    message, after = run_ranks(1, halfway, str(tmp_path), kind, tier, stage)[0]
    assert re.search(expected, message)
    assert all("a step was taken in part" in text for text in after)


def reduced_after_failure(folder: str, stage: int) -> None:
    engine = engine_of(folder, MEMORY, stage, model=model_of(Failing))
    with pytest.raises(RuntimeError, match="the middle of backward"):  # two units are being reduced, and none was stepped
        engine.backward(loss_of(engine))
    engine.allreduce_gradients()
    assert not any(stepped(engine))
    engine.zero_grad()
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reducing_after_a_failed_backward_steps_no_unit(stage: int, tmp_path: Path) -> None:
    run_ranks(2, reduced_after_failure, str(tmp_path), stage)


def retried(folder: str, stage: int, fails: bool) -> list[Tensor]:
    engine = engine_of(folder, MEMORY, stage, model=model_of(Failing if fails else Block))
    if fails:
        with pytest.raises(RuntimeError, match="the middle of backward"):  # two units are being reduced
            engine.backward(loss_of(engine))
        engine.zero_grad()
        for module in engine.module.modules():
            if isinstance(module, Failing):
                module.fails = False
    for number in range(1, 4):
        engine.backward(loss_of(engine, number))
        assert all(stepped(engine))
        engine.step()
    found = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", range(4))
def test_a_backward_after_a_failed_one_steps_only_reduced_gradients(stage: int, tmp_path: Path) -> None:
    plain, found = (run_ranks(2, retried, str(tmp_path), stage, fails)[0] for fails in (False, True))
    assert len(plain) == 6 and all(map(torch.equal, plain, found))


def harmed(folder: str) -> tuple[str, str]:
    engine = engine_of(folder, ALL)
    engine.backward(loss_of(engine))
    engine.step()
    file = next(Path(folder).glob("shoal-swap-*/*.swap"))
    assert engine.optimizer is not None
    engine.optimizer.finish_deferred_steps()
    os.truncate(file, 0)
    with pytest.raises(TierError) as raised:
        for number in range(3):
            engine.backward(loss_of(engine, number))
            engine.step()
    return str(raised.value), str(file)


def test_a_damaged_swap_file_is_named_in_the_error(tmp_path: Path) -> None:
    message, file = run_ranks(1, harmed, str(tmp_path))[0]
    assert file in message and "rank 0" in message and "unit '" in message


def unfinished(folder: str, tier: dict[str, Any], stage: int, ends: bool) -> None:
    engine = engine_of(folder, tier, stage)
    engine.backward(loss_of(engine))
    if ends:
        engine.step()
    with logged() as lines:
        engine.destroy()
    assert any("backward has begun a step that engine.step() has not ended" in line for line in lines) == (not ends)
    assert all(bool(parameter.isfinite().all()) for parameter in engine.module.parameters())


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("tier", "stage"), [(MEMORY, 1), (ON_HOST, 2), (ALL, 0), (ALL, 3)])
def test_an_engine_destroyed_before_the_step_says_so(tier: Any, stage: int, ends: bool, tmp_path: Path) -> None:
    run_ranks(2, unfinished, str(tmp_path), tier, stage, ends)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("more", "other", "fix"), [
    ({"gradient_clipping": 1.0}, "gradient_clipping", "set it to 0"),
    ({"fp16": {"enabled": True}}, "fp16.enabled", "use bf16"),
    ({"communication_data_type": "fp16"}, "communication_data_type", "choose another"),
    ({"bf16": {"enabled": True}}, "bf16.check_grad_overflow", "set it to false"),
])
def test_settings_that_need_all_gradients_are_refused(more: dict[str, Any], other: str, fix: str) -> None:
    expected = f"step_in_backward: got true beside {re.escape(other)}: .* only after backward; {fix}"
    with pytest.raises(ConfigError, match=expected):
        Config.resolve(config("", MEMORY, **more), data_ranks=1)


def test_refusing_unused_parameters_conflicts_with_step_in_backward() -> None:
    given = config("", MEMORY)
    given["zero_optimization"]["ignore_unused_parameters"] = False
    with pytest.raises(ConfigError, match=r"beside zero_optimization\.ignore_unused_parameters: an unused"):
        Config.resolve(given, data_ranks=1)
