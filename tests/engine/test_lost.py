"""An engine whose state cannot be read any more can be destroyed, and another one resumes from a checkpoint.

Lost weights are logged, and are never read as if they were weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import shoal
from shoal.errors import PeerFailed, ReleasedError, TierError
from shoal.mesh import parameter_groups
from shoal.testing import run_ranks
from shoal.zero.guard import is_guarded
from shoal.zero.unit import Unit

from .test_tiers import ALL, build, config, engine_of, train, whole


@contextmanager
def logged() -> Generator[list[str]]:
    """Yield the library's log lines from here on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shoal").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("shoal").removeHandler(handler)


def lost(folder: str, kind: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    disk, saved = Path(folder) / "disk", Path(folder) / "saved"
    disk.mkdir()
    engine = engine_of(str(disk), ALL)
    train(engine, range(2))
    engine.save_checkpoint(saved)
    kept, rest = engine.module, train(engine, range(2, 4))
    [file] = disk.rglob("*.swap")
    if kind == "deleted":
        file.unlink()
    else:
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(TierError):
        train(engine, range(4, 8))
    with pytest.raises(TierError):
        engine.destroy()
    assert any(parameter.isnan().all() for parameter in kept.parameters()), "lost weights read as NaN"
    engine.destroy()  # the second call does nothing
    assert list(disk.iterdir()) == []
    losses, weights = list[float](), dict[str, Tensor]()
    for model in (kept, build()):
        again = shoal.initialize(model=model, config=config(str(disk), ALL))[0]
        again.load_checkpoint(saved)
        losses += train(again, range(2, 4))
        weights = whole(again)
        again.destroy()
    return rest, losses, weights


@pytest.mark.parametrize("kind", ["deleted", "changed"])
def test_after_losing_the_swap_file_a_checkpoint_resumes_in_process(kind: str, tmp_path: Path) -> None:
    rest, losses, weights = run_ranks(1, lost, str(tmp_path), kind)[0]
    assert losses == 2 * rest
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def refused(engine: shoal.Engine, folder: str) -> None:
    """Read weights in every way; sharded ones cannot be read without a context."""
    gathered = shoal.gathered(engine.module)
    for ask in (engine.consolidated_state_dict, lambda: engine.save_16bit_model(folder), lambda: gathered.__enter__(),
                lambda: engine(torch.ones(2, 40)), lambda: engine.save_checkpoint(folder), lambda: train(engine, range(1))):
        with pytest.raises(TierError, match=r"a step was taken in part, .*: load a checkpoint into a new engine"):
            ask()
    for ask in (lambda: [value.sum() for value in engine.module_state_dict().values()],
                lambda: [parameter.sum() for parameter in engine.module.parameters()]):
        with pytest.raises((TierError, ReleasedError)):
            ask()


def stepped_in_part(folder: str, stage: int, weights: str) -> None:
    tier = {"offload_optimizer": {"device": "nvme"}, **({"offload_param": {"device": "cpu"}} if weights == "cpu" else {})}
    given = config(folder, tier, stage)
    given["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine = shoal.initialize(model=build(), config=given)[0]
    train(engine, range(2))
    [file] = Path(folder).rglob("*.swap")
    with file.open("r+b") as there:  # the moments of the last units
        there.seek(file.stat().st_size * 3 // 4 // 4096 * 4096)
        there.write(bytes(range(256)) * 64)
    with pytest.raises(TierError, match="changed on disk"):
        train(engine, range(2, 3))
    refused(engine, folder)
    kept = engine.module
    with logged() as lines, pytest.raises(TierError, match="taken in part"):
        engine.destroy()
    assert "are lost, and read as NaN" in lines[0]
    assert all(parameter.isnan().all() for parameter in kept.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("weights", ["device", "cpu"])
@pytest.mark.parametrize("stage", range(4))
def test_after_a_partial_step_reading_weights_raises_in_every_tier(stage: int, weights: str, tmp_path: Path) -> None:
    run_ranks(1, stepped_in_part, str(tmp_path), stage, weights)


def filled(folder: str, way: str) -> tuple[list[str], list[str]]:
    """Write into lost weights; return the names of all units, and the log lines."""
    engine = engine_of(folder, ALL)
    train(engine, range(2))
    assert engine.sharded is not None
    kept, names = engine.module, [unit.name for unit in engine.sharded.units]
    [file] = Path(folder).rglob("*.swap")
    file.unlink()
    with logged() as lines, pytest.raises(TierError):
        engine.destroy()
    assert any(is_guarded(parameter) for parameter in kept.parameters()), "unused parameters take no memory"
    fresh = build()
    match way:
        case "loaded":
            kept.load_state_dict(fresh.state_dict())
        case "copied":
            with torch.no_grad():
                for parameter, value in zip(kept.parameters(), fresh.parameters(), strict=True):
                    parameter.copy_(value)
        case _:
            torch.manual_seed(0)
            for layer in (module for module in kept.modules() if isinstance(module, nn.Linear)):
                layer.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), fresh.parameters(), strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in kept.parameters())
    kept(torch.ones(2, 40)).sum().backward()
    assert all(parameter.grad is not None for parameter in kept.parameters())
    return names, lines


@pytest.mark.parametrize("way", ["loaded", "copied", "drawn"])
def test_lost_weights_are_logged_by_unit_and_can_be_written(way: str, tmp_path: Path) -> None:
    names, lines = run_ranks(1, filled, str(tmp_path), way)[0]
    [line] = lines
    assert line.startswith("rank 0: destroy: the parameters of units '") and "the file was deleted" in line
    assert any(f"'{name}'" in line for name in names)


SHARDED: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "timeout": 60,
                           "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 60}}


def failed_alone(folder: Path) -> tuple[list[str], list[str]]:
    """Fail on rank 1 while rank 0 is busy; return the errors of reading each parameter there, and the log lines."""
    model, values = build(), [parameter.detach().clone() for parameter in build().parameters()]

    gave_up = folder / "gave_up"

    def choose(groups: Any) -> SGD:
        if dist.get_rank() == 1:
            raise ValueError("no optimizer today")
        while not gave_up.exists():  # take part in no gather until rank 1 has given up
            time.sleep(0.05)
        return SGD(groups, lr=0.1)

    if dist.get_rank() == 0:
        with pytest.raises(PeerFailed, match="rank 1: initialize failed: ValueError: no optimizer today"):
            shoal.initialize(model=model, config=SHARDED, optimizer=choose)
        return [], []
    parameter_groups._CLEANUP_TIMEOUT = timedelta(seconds=3)  # rank 0 takes no part in the cleanup
    with logged() as lines, pytest.raises(ValueError, match="no optimizer today"):
        shoal.initialize(model=model, config=SHARDED, optimizer=choose)
    gave_up.touch()
    found = []
    for parameter, value in zip(model.parameters(), values, strict=True):
        try:
            found.append("equal" if torch.equal(parameter, value) else "other values")
        except ReleasedError as error:
            found.append(str(error))
    with pytest.raises(ReleasedError, match="build the model again"):
        model.state_dict()
    return found, lines


def test_shards_that_a_failed_rank_cannot_return_are_logged_and_guarded(tmp_path: Path) -> None:
    found, lines = run_ranks(2, failed_alone, tmp_path)[1]
    assert found[1::2] == ["equal"] * 6, "biases, which rest whole on each rank"
    assert all("whose engine is gone without giving it back: build the model again" in text for text in found[::2])
    [line] = lines
    assert "rank 1: initialize failed, and the parameters of units '" in line and "did not finish within 3 s" in line


def full(ranks: tuple[int, ...]) -> tuple[str, bool]:
    """Fill the disks of `ranks`; return this rank's error, and whether its model was restored."""
    def fill(self: Unit, name: str, *args: Any, **options: Any) -> None:
        if dist.get_rank() in ranks and name == last:
            time.sleep(0.2 * dist.get_rank())
            raise TierError(f"no room for unit '{name}'")
        made(self, name, *args, **options)

    made, last = Unit.__init__, "2"
    Unit.__init__ = fill
    model = build()
    expected = TierError if dist.get_rank() in ranks else PeerFailed
    with pytest.raises(expected) as raised:
        shoal.initialize(model=model, config=SHARDED | {"optimizer": {"type": "SGD"}})
    try:
        whole = all(torch.equal(a, b) for a, b in zip(model.parameters(), build().parameters(), strict=True))
    except ReleasedError:
        whole = False
    return str(raised.value), whole


def test_one_full_disk_is_the_error_of_every_rank() -> None:
    heard = ("rank 1: initialize failed: TierError: no room for unit '2'", False)
    assert run_ranks(3, full, (1,)) == [heard, ("no room for unit '2'", False), heard]


def test_when_all_disks_are_full_the_model_is_restored() -> None:
    assert run_ranks(3, full, (0, 1, 2)) == [("no room for unit '2'", True)] * 3
