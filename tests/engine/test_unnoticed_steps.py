"""On disks backward attempts the next step unless told otherwise, and nobody notices: whatever a script does before `step`,
it finds what a script finds whose steps wait for `step`, and goes on to the same bits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.engine import storage_plan
from shoal.testing import run_ranks
from shoal.tier.open_stores import WRITE_AHEAD
from shoal.tier.swap import Swap
from shoal.zero.working_memory import working

from ..attempts import counted_ends
from .test_step_in_backward import ALL, Block, Detached, InPart, loss_of, model_of, stepped, weights

STEPS, WITH = 8, (2, 5)
UNITS = 5


def engine_of(folder: str, stage: int, within: bool | None, *, model: nn.Module | None = None, **more: Any) -> shoal.Engine:
    placed = {key: {**block, "nvme_path": folder} for key, block in ALL.items()}
    if within is not None:
        placed["offload_optimizer"]["step_in_backward"] = within
    config = {"train_micro_batch_size_per_gpu": 2, "timeout": 20, "zero_optimization": {"stage": stage, **placed},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **more}
    return shoal.initialize(model=model or model_of(), config=config)[0]


# What a script may do between backward and step: returns what it finds


def evaluate(engine: shoal.Engine) -> list[Tensor]:
    with torch.no_grad():
        return [loss_of(engine, 77)]


def look(engine: shoal.Engine) -> list[Tensor]:
    with shoal.gathered(engine.module):
        return [parameter.detach().clone() for parameter in engine.module.parameters()]


def write(engine: shoal.Engine) -> list[Tensor]:
    with shoal.gathered(engine.module, modifier_rank=0), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(0.01)
    return []


def begin_anew(engine: shoal.Engine) -> list[Tensor]:
    engine.zero_grad()
    engine.backward(loss_of(engine, 78))
    return []


def add_a_loss(engine: shoal.Engine) -> list[Tensor]:
    return [engine.backward(loss_of(engine, 79))]


def add_a_loss_of_its_own(engine: shoal.Engine) -> list[Tensor]:
    engine.scale(loss_of(engine, 79)).backward()
    return []


def look_at_state(engine: shoal.Engine) -> list[Tensor]:
    assert engine.optimizer is not None
    found = [value.clone() for state in engine.optimizer.state.values() for value in state.values()]
    return [value for value in found if engine.communicator.ranks == 1 or not value.dim()]


def change_rate(engine: shoal.Engine) -> list[Tensor]:
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.5
    return []


def change_betas_in_place(engine: shoal.Engine) -> list[Tensor]:
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        group["betas"] = group["betas"] if isinstance(group["betas"], list) else list(group["betas"])
        group["betas"][0] *= 0.9
    return []


def look_at_what_the_optimizer_holds(engine: shoal.Engine) -> list[Tensor]:
    """Beside the state, what it costs, and its own copy of what is no moment."""
    assert engine.basic_optimizer is not None
    counts = [state["step"].clone() for state in engine.basic_optimizer.state.values()]
    return [*counts, torch.tensor(engine.model_state_bytes().moments), torch.tensor(len(engine.basic_optimizer.state))]


def count_anew(engine: shoal.Engine) -> list[Tensor]:
    """Once a unit was stepped: those that are stepped afterwards begin from what they find, and stand."""
    assert engine.basic_optimizer is not None and engine.optimizer is not None
    attempt = engine.optimizer._within._attempt
    while attempt.begun and not attempt._states:
        time.sleep(0.001)
    for state in engine.basic_optimizer.state.values():
        state["step"].zero_()
    return []


def add_a_hook(engine: shoal.Engine) -> list[Tensor]:
    assert engine.basic_optimizer is not None
    engine.basic_optimizer.register_step_pre_hook(_halve)
    return []


def _halve(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def save(engine: shoal.Engine) -> list[Tensor]:
    engine.save_checkpoint(_saved(engine), tag="between")
    return []


def load(engine: shoal.Engine) -> list[Tensor]:
    engine.load_checkpoint(_saved(engine), tag="before")
    engine.backward(loss_of(engine, 80))
    return []


def do_without(engine: shoal.Engine) -> list[Tensor]:
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    engine._boundary = None
    engine.backward(loss_of(engine, 81))
    return []


def _saved(engine: shoal.Engine) -> str:
    assert engine.sharded is not None
    return str(engine.sharded.residence.swaps[0].path.parent.parent / "saved")


ACTIONS: dict[str, Callable[[shoal.Engine], list[Tensor]]] = {
    action.__name__: action
    for action in (evaluate, look, write, weights, begin_anew, add_a_loss, add_a_loss_of_its_own, look_at_state, change_rate,
                   change_betas_in_place, look_at_what_the_optimizer_holds, count_anew, add_a_hook, save, load, do_without)}
UNDONE_BY = {name: name != "look_at_what_the_optimizer_holds" for name in ACTIONS}


def trained(folder: str, stage: int, within: bool | None, action: Callable[[shoal.Engine], list[Tensor]], *,
            model: nn.Module | None = None, **more: Any) -> tuple[list[Tensor], Counter[str]]:
    """Return what a training finds whose steps some `action` comes before, its weights, and the ends of its attempts."""
    with counted_ends() as ends:
        engine = engine_of(folder, stage, within, model=model, **more)
        if action is load:
            engine.save_checkpoint(f"{folder}/saved", tag="before")
        found: list[Tensor] = []
        for number in range(STEPS):
            found.append(engine.backward(loss_of(engine, number)))
            if number in WITH:
                found += action(engine)
            engine.step()
        found += weights(engine)
        engine.destroy()
    return found, ends


def both(folder: str, stage: int, clipping: float) -> dict[str, tuple[bool, Counter[str]]]:
    """Return for each action whether a script finds the same as without attempts, and how these ended."""
    found: dict[str, tuple[bool, Counter[str]]] = {}
    for name, action in ACTIONS.items():
        plain, none = trained(folder, stage, False, action, gradient_clipping=clipping)
        attempted, ends = trained(folder, stage, None, action, gradient_clipping=clipping)
        assert not none
        found[name] = len(plain) == len(attempted) and all(map(torch.equal, plain, attempted)), ends
    return found


@pytest.mark.parametrize(("ranks", "stage", "clipping"), [(1, 3, 0.0), (2, 0, 1e3), (2, 2, 0.0), (2, 3, 1e3)])
def test_whatever_comes_before_step_finds_what_it_would_have_found(ranks: int, stage: int, clipping: float,
                                                                   tmp_path: Path) -> None:
    for found in run_ranks(ranks, both, str(tmp_path), stage, clipping):
        for name, (same, ends) in found.items():
            assert same, name
            assert ends["accept"] and UNDONE_BY[name] == (ends["undo"] > 0), (name, ends)


def read_again(folder: str, stage: int, kind: type[Block]) -> tuple[bool, Counter[str]]:
    plain, _ = trained(folder, stage, False, lambda engine: [], model=model_of(kind))
    attempted, ends = trained(folder, stage, None, lambda engine: [], model=model_of(kind))
    return all(map(torch.equal, plain, attempted)), ends


@pytest.mark.parametrize("kind", [Detached, InPart])
@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_a_backward_that_reads_weights_again_finds_those_of_its_forward(ranks: int, stage: int, kind: type[Block],
                                                                        tmp_path: Path) -> None:
    for same, ends in run_ranks(ranks, read_again, str(tmp_path), stage, kind):
        assert same
        assert ends["undo"] or ranks > 1, "where sums over the ranks are on their way, weights are read before they arrive"


def scaled(folder: str, within: bool | None) -> list[Tensor]:
    """Train in fp16, and change the loss scale between a backward and its step."""
    engine = engine_of(folder, 3, within, fp16={"enabled": True, "initial_scale_power": 4, "auto_cast": True})
    assert engine.optimizer is not None
    for number in range(4):
        engine.backward(loss_of(engine, number))
        if number == 2:
            assert stepped(engine) == [within is None] * UNITS
            engine.optimizer.scaler.load_state_dict({**engine.optimizer.scaler.state_dict(), "value": 64.0})
        engine.step()
    return weights(engine)


def test_a_loss_scale_that_changes_before_step_is_that_of_the_step(tmp_path: Path) -> None:
    plain, attempted = (run_ranks(1, scaled, str(tmp_path), within)[0] for within in (False, None))
    assert all(map(torch.equal, plain, attempted))


def counted(folder: str, within: bool | None) -> list[float]:
    """Return what a step count that somebody holds on to says before each step, one of which is clipped."""
    engine, found = engine_of(folder, 3, within, gradient_clipping=1e3), list[float]()
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.optimizer is not None
    count = next(iter(engine.optimizer.state.values()))["step"]
    for number in range(1, 6):
        engine.backward(1e9 * loss_of(engine, number) if number == 3 else loss_of(engine, number))
        found.append(count.item())
        engine.step()
    return found


def test_step_counts_that_are_held_on_to_go_on(tmp_path: Path) -> None:
    for within in (False, None):
        assert run_ranks(1, counted, str(tmp_path), within)[0] == [1, 2, 3, 4, 5], within


def kept(folder: str, within: bool | None) -> list[Tensor]:
    """Train by two passes of one graph."""
    engine = engine_of(folder, 3, within)
    for number in range(4):
        loss = loss_of(engine, number)
        engine.backward(loss, retain_graph=True)
        assert stepped(engine) == [False] * UNITS
        engine.backward(loss)
        engine.step()
    return weights(engine)


def test_a_graph_that_is_kept_is_gone_through_again(tmp_path: Path) -> None:
    plain, attempted = (run_ranks(1, kept, str(tmp_path), within)[0] for within in (False, None))
    assert all(map(torch.equal, plain, attempted))


def destroyed(folder: str) -> None:
    engine = engine_of(folder, 3, None)
    for number in range(2):
        engine.backward(loss_of(engine, number))
        engine.step()
    before = weights(engine)
    engine.backward(loss_of(engine, 2))
    assert stepped(engine) == [True] * UNITS
    engine.destroy()
    assert all(map(torch.equal, before, engine.module.parameters()))


def test_an_engine_that_is_destroyed_before_step_leaves_the_weights_of_the_last_one(tmp_path: Path) -> None:
    run_ranks(2, destroyed, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# Where there is no room


def attempts(folder: str, free: int, left: int) -> list[bool]:
    """Return which units backward attempts where a disk has `free` bytes, and the memory `left`."""
    storage_plan.free_bytes = lambda path: free
    storage_plan.memory_left = lambda: left
    engine = engine_of(folder, 3, None)
    engine.backward(loss_of(engine))
    engine.step()
    engine.backward(loss_of(engine))
    found = stepped(engine)
    engine.destroy()
    return found


ELEMENTS = [parameter.numel() for parameter in model_of().parameters()]


@pytest.mark.parametrize(("free", "attempted"), [(2 * 12, True), (2 * 12 - 1, False)])
def test_attempts_take_at_most_half_of_what_is_left_of_the_disk(free: int, attempted: bool, tmp_path: Path) -> None:
    found = run_ranks(1, attempts, str(tmp_path), (16 + free) * sum(ELEMENTS), 1 << 40)
    assert found == [[attempted] * UNITS]


def test_attempts_take_at_most_an_eighth_of_what_is_left_of_memory(tmp_path: Path) -> None:
    """What they take more are pieces of the step beside backward, and the weights of units that wait for theirs."""
    units = [ELEMENTS[0] + ELEMENTS[1], *ELEMENTS[2:]]
    attempted, plain = (working(units, 3, 1, compute=torch.float32, accumulate=torch.float32, weights_away=True,
                                state_away=True, window=2, pieces=2, write_ahead=WRITE_AHEAD, in_backward=within,
                                attempted=within).total for within in (True, False))
    assert attempted > plain
    for left, some in ((8 * (attempted - plain), True), (8 * (attempted - plain) - 1, False)):
        assert run_ranks(1, attempts, str(tmp_path), 1 << 40, left) == [[some] * UNITS]


def filled(folder: str, within: bool | None) -> tuple[list[bool], list[Tensor]]:
    """Train on a disk that somebody else fills once training has begun; return what backward attempts, and the weights."""
    engine = engine_of(folder, 3, within)
    assert engine.sharded is not None
    swap, begun = engine.sharded.residence.swaps[0], list[bool]()
    for number in range(4):
        engine.backward(loss_of(engine, number))
        begun += stepped(engine)
        engine.step()
        if number == 0:
            assert engine.optimizer is not None
            engine.optimizer.settle()  # the moments are there
            swap._reserve = partial(_full, swap)
    found = weights(engine)
    engine.destroy()
    return begun, found


def _full(swap: Swap, bytes: int, name: str) -> None:
    raise swap._file.error("write", name, 0, "No space left on device")


def test_a_disk_that_is_full_by_then_does_not_end_a_training(tmp_path: Path) -> None:
    (begun, found), (_, plain) = (run_ranks(1, filled, str(tmp_path), within)[0] for within in (None, False))
    assert not any(begun)
    assert all(map(torch.equal, found, plain))


class Late(nn.Module):
    """Uses its last layer from the sixth forward on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(5))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        for layer in list(self.layers)[:5 if self.forwards > 5 else 4]:
            x = torch.tanh(layer(x))
        return x


def narrow(folder: str, within: bool | None, bytes_each: float) -> list[Tensor]:
    """Train on a disk that has room for so many bytes of an element, and moments that are made late."""
    engine = engine_of(folder, 3, within, model=Late())
    assert engine.sharded is not None
    swap, most = engine.sharded.residence.swaps[0], bytes_each * 5 * 64 * 64
    reserve = swap._reserve

    def limited(bytes: int, name: str) -> None:
        if swap._extents.size + bytes > most:
            _full(swap, bytes, name)
        reserve(bytes, name)

    swap._reserve = limited
    for number in range(8):
        engine.backward(loss_of(engine, number))
        engine.step()
    return weights(engine)


@pytest.mark.parametrize("bytes_each", [16.5, 18, 20, 24, 28])
def test_a_disk_that_training_fits_on_is_enough(bytes_each: float, tmp_path: Path) -> None:
    plain, attempted = (run_ranks(1, narrow, str(tmp_path), within, bytes_each)[0] for within in (False, None))
    assert all(map(torch.equal, plain, attempted))
