"""The fuzzer reports a fault with the line that reproduces it, and goes on; a seed gives one composition."""

from __future__ import annotations

import pytest
from torch import Tensor

from . import plain
from .__main__ import main
from .draw import Composition, draw
from .plain import Trained, train

SEED = 4
"""A composition of few ranks and steps."""


def test_a_seed_gives_the_same_composition_each_time() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({str(draw(seed)) for seed in range(50)}) == 50


def test_a_fault_is_reported_with_its_reproduction(monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    def faulty(composition: Composition) -> list[Trained]:
        found = train(composition)
        if composition.seed == SEED:
            found[0].losses[1] *= 1.1
            found[1].end = {name: value + 1 for name, value in found[1].end.items()}
        return found

    monkeypatch.setattr(plain, "train", faulty)
    assert main(["--seed", str(SEED), "--count", "2"]) == 1
    text = capsys.readouterr().out
    assert f"1/2 seed {SEED}: DIFFERS" in text and f"2/2 seed {SEED + 1}: ok" in text
    assert "topology 1: loss of step 2: " in text and "topology 2: weight 0.places after step 2: " in text
    assert f"reproduce: make fuzz SEED={SEED} COUNT=1" in text
    assert f"fuzz: 1 of 2 compositions train as plain PyTorch does; the seeds {SEED} do not" in text


def test_a_wrong_start_and_a_failing_rank_are_reported(monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    def shifted(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.nextafter(value + 1) for name, value in state.items()}

    def faulty(composition: Composition) -> list[Trained]:
        found = train(composition)
        if composition.seed == SEED:
            found[0].start = shifted(found[0].start)
        return found

    monkeypatch.setattr(plain, "train", faulty)
    assert main(["--seed", str(SEED), "--count", "1"]) == 1
    assert "is not bit by bit what it should start from" in capsys.readouterr().out
    monkeypatch.setenv("SHOAL_TEST_TIMEOUT", "0")
    assert main(["--seed", str(SEED + 1), "--count", "1"]) == 1
    assert "topology 1 failed: ranks" in capsys.readouterr().out
