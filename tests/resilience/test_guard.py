"""The guard tells hardware from data by a replay, names the rank or the samples, and changes nothing else."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.data.order import permutation
from shoal.engine.schema import Config
from shoal.errors import ConfigError, GuardError
from shoal.recording.page import PAGES
from shoal.resilience.guard import LEAST, Guard, History, Samples
from shoal.resilience.settings import GuardSettings
from shoal.testing import run_ranks
from shoal.transport.collectives import Communicator

STEPS = 20
"""About three epochs of seven steps."""


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, poisoned: tuple[int, ...] = ()) -> None:
        self.poisoned = poisoned

    def __len__(self) -> int:
        return 84

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return row * (torch.nan if index in self.poisoned else 1), row.sum()


def attempt(memory: str, stage: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train to the last step from what an earlier attempt left; return the losses by step, the log, and how it ended."""
    if options.get("guard", True):
        os.environ[PAGES] = memory
        os.makedirs(memory, exist_ok=True)
    messages: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: messages.append(record.getMessage())
    torch.manual_seed(0)
    config = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3,
              "optimizer": {"type": "Adam", "params": {"lr": 0.01}}, "zero_optimization": {"stage": stage},
              "resilience": {"vault": {"every": 3},
                             "guard": {"enabled": options.get("guard", True), "deviations": 1e6, "max_skips": 1}}}
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))

    def flip(gradient: Tensor) -> Tensor:
        if engine.global_rank == 1 and engine.global_steps == options.get("flip"):
            if factor := options.get("factor"):
                return gradient * factor
            gradient = gradient.clone()
            gradient.view(-1).view(torch.int32)[3] ^= 1 << 30
        return gradient

    model[0].weight.register_hook(flip)
    engine, _, loader, _ = shoal.initialize(model=model, training_data=Rows(options.get("poisoned", ())), config=config)
    assert loader is not None
    loader.skip(0, options.get("skip", ()))
    engine.load_checkpoint(f"{memory}/none")
    losses: dict[int, float] = {}
    ended = ""
    try:
        while engine.global_steps < STEPS:
            for rows, targets in loader:
                loss = (engine(rows).squeeze(1) - targets).square().mean()
                engine.backward(loss)
                engine.step()
                losses[engine.micro_steps] = loss.item()
                if engine.global_steps == STEPS:
                    break
    except GuardError as error:
        ended = f"{type(error).__name__}: {error}"
    return {"losses": losses, "messages": messages, "ended": ended}


def attempts(memory: Path, stage: int, count: int, **options: Any) -> list[list[dict[str, Any]]]:
    """Return what each rank returns in each of `count` attempts; `flip` counts in the first alone."""
    return [run_ranks(2, attempt, str(memory), stage, options if number == 0 else {**options, "flip": None})
            for number in range(count)]


def failing_attempts(memory: Path, factors: tuple[float, ...]) -> list[list[dict[str, Any]]]:
    """Return what each rank returns in each attempt, where rank 1 computes another wrong gradient each time."""
    return [run_ranks(2, attempt, str(memory), 0, {"flip": 13, "factor": factor}) for factor in factors]


def joined(found: list[list[dict[str, Any]]], rank: int) -> dict[int, float]:
    """Return the losses of a rank, of the last attempt that came to each microbatch."""
    return {step: loss for each in found for step, loss in each[rank]["losses"].items()}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_flipped_bit_is_replayed_and_its_rank_is_named(tmp_path: Path, stage: int) -> None:
    found = attempts(tmp_path / "memory", stage, 2, flip=13)
    assert all(each["ended"].startswith("GuardRewind: step 14: the gradient norm is ") for each in found[0])
    assert [each["ended"] for each in found[1]] == ["", ""]
    assert any("hardware: rank 1 had another result" in text for text in found[1][0]["messages"])
    (undisturbed,) = attempts(tmp_path / "other", stage, 1, guard=False)
    for rank in range(2):
        assert joined(found, rank) == undisturbed[rank]["losses"]


def test_a_device_that_fails_in_another_way_is_named_and_skips_no_sample(tmp_path: Path) -> None:
    found = failing_attempts(tmp_path / "memory", (1e9, 3e9, 5e9))
    assert [each[0]["ended"].partition(":")[0] for each in found] == ["GuardRewind", "GuardRewind", "GuardError"]
    for each in found[1:]:
        assert "its replay gave another result: rank 1 had another result" in each[1]["ended"]
        assert "Its samples are skipped" not in "".join(each[0]["messages"])
    assert "take the device out of the job" in found[2][0]["ended"]


@pytest.mark.parametrize("stage", [1, 2])
def test_poisoned_samples_are_skipped_as_if_they_had_never_been(tmp_path: Path, stage: int) -> None:
    poisoned = int(permutation(84, seed=0, epoch=0, shuffle=True)[55])  # of step 5, after the first copy
    found = attempts(tmp_path / "memory", stage, 3, poisoned=(poisoned,))
    assert all("step 5: the loss is nan" in each["ended"] and "it is replayed" in each["ended"] for each in found[0])
    (skipped,) = re.findall(r"without the samples of this step \(epoch 0: ([\d, ]+)\)", found[1][0]["ended"])
    ids = [int(each) for each in skipped.split(", ")]
    assert len(set(ids)) == 12
    assert poisoned in ids
    assert [each["ended"] for each in found[2]] == ["", ""]
    (without,) = attempts(tmp_path / "other", stage, 1, skip=ids, guard=False)
    for rank in range(2):
        assert joined(found, rank) == without[rank]["losses"]


def test_samples_are_skipped_as_often_as_the_configuration_says(tmp_path: Path) -> None:
    found = attempts(tmp_path / "memory", 2, 4, poisoned=tuple(range(0, 84, 5)))
    assert [each[0]["ended"].partition(":")[0] for each in found] == [*["GuardRewind"] * 3, "GuardError"]
    assert ("Steps were skipped or replayed 1 times already within 64 steps (resilience.guard.max_skips)"
            in found[3][0]["ended"])


def test_a_record_that_cannot_be_written_is_logged_and_the_ranks_rewind(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / "memory" / f"vault0.guard.part{rank}").mkdir(parents=True)
    found = attempts(tmp_path / "memory", 0, 2, flip=13)
    for rank in range(2):
        assert found[0][rank]["ended"].startswith("GuardRewind: step 14: ")
        assert any("another attempt will not know of this step" in text for text in found[0][rank]["messages"])
        assert found[1][rank]["ended"] == ""


def verdict_on_a_replay(path: str, norms: list[float]) -> str:
    """Return what a guard says of a step and its replay, in which only the global norm is another; `norms` are by rank."""
    assert dist.group.WORLD is not None
    ranks, ended = Communicator(dist.group.WORLD, timeout=20), ""
    for measured in (float("inf"), norms[ranks.rank]):
        guard = Guard(Path(path), GuardSettings(), ranks)
        guard.load_state_dict({"gradient norm": [1.0] * LEAST})
        guard.note_loss(torch.tensor(1.0))
        with pytest.raises(GuardError) as raised:
            guard.judge(7, measured, torch.tensor(1.0), lambda: [Samples(epoch=0, ids=[3])])
        ended = str(raised.value)
    return ended


IN_THE_SUM = "its replay gave another result: the ranks' own losses and gradients were the same, so it was in their sum"


@pytest.mark.parametrize(("norms", "words"), [
    ([1e9, 1e9], IN_THE_SUM), ([1.0, 1e9], IN_THE_SUM), ([float("nan"), float("nan")], "the data is at fault"),
    ([1.0, float("inf")], "the data is at fault"),
])
def test_an_error_in_the_sum_over_ranks_skips_no_sample(tmp_path: Path, norms: list[float], words: str) -> None:
    for rank, found in enumerate(run_ranks(2, verdict_on_a_replay, str(tmp_path / "record"), norms)):
        assert words in found, rank


def verdict_after(path: str, samples: list[Samples]) -> str:
    """Return what a guard logs of a step that is in order at its replay, with `samples` that the engine has drawn."""
    assert dist.group.WORLD is not None
    messages: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: messages.append(record.getMessage())
    for loss in (float("nan"), 1.0):
        guard = Guard(Path(path), GuardSettings(), Communicator(dist.group.WORLD, timeout=20))
        guard.note_loss(torch.tensor(loss))
        with suppress(GuardError):
            guard.judge(7, 1.0, torch.tensor(1.0), lambda: samples)
    return "".join(messages)


@pytest.mark.parametrize("drawn", [True, False])
def test_hardware_is_not_certain_where_the_script_draws_samples(tmp_path: Path, drawn: bool) -> None:
    samples = [Samples(epoch=0, ids=[3])] if drawn else []
    (found,) = run_ranks(1, verdict_after, str(tmp_path / "record"), samples)
    assert "This is a fault of hardware: rank 0 had another result" in found
    assert ("unless the script gave the step other samples" in found) is not drawn


def steps_after_a_caught_rewind(path: str) -> tuple[list[str], list[str]]:
    """Return what a guard raises at the steps of a script that catches all, until it loads a checkpoint, and the log."""
    assert dist.group.WORLD is not None
    messages: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: messages.append(record.getMessage())
    guard = Guard(Path(path), GuardSettings(), Communicator(dist.group.WORLD, timeout=20))
    raised: list[str] = []
    for loss in (float("nan"), 1.0, 1.0):
        guard.note_loss(torch.tensor(loss))
        try:
            guard.judge(7, 1.0, torch.tensor(1.0), lambda: [Samples(epoch=0, ids=[3])])
        except GuardError as error:
            raised.append(f"{type(error).__name__}: {error}")
    assert len(messages) == (dist.get_rank() == 0)
    guard.load_state_dict({})
    guard.note_loss(torch.tensor(1.0))
    guard.judge(7, 1.0, torch.tensor(1.0), lambda: [Samples(epoch=0, ids=[3])])
    return raised, messages


def test_a_step_after_a_caught_rewind_is_no_replay(tmp_path: Path) -> None:
    (raised, messages), _ = run_ranks(2, steps_after_a_caught_rewind, str(tmp_path / "record"))
    assert raised[0].startswith("GuardRewind: step 7: the loss is nan. ")
    assert raised[1] == raised[2]
    assert raised[1].startswith("GuardRewind: the script caught the GuardRewind of an earlier step and goes on, ")
    assert "The GuardRewind was: step 7: the loss is nan. " in raised[1]
    assert "hardware: " not in messages[0]
    assert "This is a fault of hardware" in messages[1]


def losses_of_a_guard(memory: str) -> tuple[int, float]:
    """Discard a microbatch of which the loss is no number, and train on; return the steps, and the guard's first loss."""
    os.environ[PAGES] = memory
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"},
              "resilience": {"vault": {"every": 9}, "guard": {"enabled": True}}}
    engine, *_ = shoal.initialize(model=nn.Linear(2, 1, bias=False), config=config)
    engine.backward(engine(torch.ones(2, 2)).sum() * torch.nan)
    engine.zero_grad()
    for _ in range(2):
        engine.backward(engine(torch.zeros(2, 2)).sum())
        engine.step()
    return engine.global_steps, engine.guard.state_dict()["loss"][0]


def test_the_loss_of_a_discarded_microbatch_is_not_judged(tmp_path: Path) -> None:
    assert run_ranks(1, losses_of_a_guard, str(tmp_path)) == [(1, 0.0)]


def test_a_value_is_far_off_where_it_is_no_number_or_above_its_limit() -> None:
    history = History(16, deviations=10)
    history.values.extend([1.0] * (LEAST - 1))
    assert history.objection("loss", 1e9) is None
    assert history.objection("loss", float("inf")) == "the loss is inf"
    history.values.append(1.0)
    assert history.limit == pytest.approx(1.1)
    assert history.objection("loss", 1.05) is None
    assert history.objection("loss", 0.0) is None
    assert history.objection("loss", 2.0) == "the loss is 2, above 1.1; the median of the last 8 steps is 1"


def test_a_guard_without_vault_is_refused_and_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"resilience.guard.enabled: got true, and there are no copies .*vault.every"):
        Config.resolve({"train_batch_size": 1, "resilience": {"guard": {"enabled": True}}}, data_ranks=1)
