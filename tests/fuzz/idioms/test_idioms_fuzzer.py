"""The fuzzer of idioms reports differences, exceptions and crashes with the line that reproduces them, and goes on."""

from __future__ import annotations

import os
from random import Random

import pytest
import torch

from . import __main__ as command
from . import run
from .model import ByEngine, Trained
from .operations import OPERATIONS, Found, Operation
from .program import draw

run_in_turn = run.run_in_turn


def fault(trained: Trained, random: Random) -> Found:
    """Go wrong by the engine, in another way for each seed."""
    match random.randrange(3) if isinstance(trained, ByEngine) else None:
        case 0:
            os.abort()
        case 1:
            raise KeyError("a mistake of the engine")
        case 2:
            return [torch.full((2,), 2.0)]
        case _:
            return [torch.ones(2)]


def with_faults(seeds: list[int], folder: str) -> None:
    """Run programs on this rank whose evaluations go wrong."""
    OPERATIONS["evaluate"] = Operation(run=fault, weight=OPERATIONS["evaluate"].weight)
    run_in_turn(seeds, folder)


def test_a_seed_gives_the_same_program_each_time() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({str(draw(seed)) for seed in range(50)}) == 50


def test_faults_are_reported_and_the_other_programs_run(monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    wanted: dict[int | None, int] = {}  # a seed for each fault, and one without
    for program in (draw(seed) for seed in range(2000)):
        if program.ranks == 1 and program.stage == 3:
            first = next((step for step in program.steps if step.name == "evaluate"), None)
            wanted.setdefault(Random(first.seed).randrange(3) if first is not None and first == program.steps[0] else
                              None if first is None else 3, program.seed)
    monkeypatch.setattr(run, "run_in_turn", with_faults)
    seeds = [wanted[kind] for kind in (0, 1, 2, None)]
    found = {outcome.seed: outcome for outcome in run.run_many(seeds, 1)}
    assert [found[seed].kind for seed in seeds[:3]] == ["FAILS"] * 3 and found[seeds[3]].kind != "FAILS"
    for seed, text in zip(seeds, ("died without an error", "a mistake of the engine", "1.41 apart"), strict=False):
        assert text in found[seed].text
    assert command.main(["--seed", str(seeds[2]), "--count", "1"]) == 1
    assert f"reproduce: make fuzz-idioms SEED={seeds[2]} COUNT=1" in capsys.readouterr().out
