"""Runs that are there are not run again, interrupted ones go on, and what all have learned is laid side by side."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path

import pytest
from convergence import COUNTERPARTS, DDP, Case, baseline, counterpart, outcome, percent, text, train, verdict
from ddp_hooks import BY_NAME
from runs import Run, RunFailed
from training_quality import Learned, band, picture

GPT = Path(__file__).parents[2] / "examples" / "gpt"
TRAINED = """
import json, pathlib
print("step 1/7  loss 2.0 (2.9 bits)  grad 1.0")
out = pathlib.Path({out!r})
(out / "curve.csv").write_text("step,bits_per_byte\\n1,4.0\\n2,3.0\\n")
(out / "quality.json").write_text(json.dumps({{"step": 7, "bits_per_byte": 2.5}}))
"""
OPTIONS = argparse.Namespace(model="3m", ranks=2, seeds=[0, 1], plot=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "some.json"
    path.write_text("{}")
    return path


def run_of(config: Path, seed: int = 0) -> Run:
    return Run(config=config, seed=seed, steps=7, model="tiny", ranks=2, folder=config.parent / "runs")


def commanded(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let runs be a few lines of Python in place of training."""
    monkeypatch.setattr(Run, "command", property(lambda run: [sys.executable, "-c", code.format(out=str(run.out))]))


def learned(*bits: float) -> list[Learned]:
    return [Learned(bits=each, training={step: each + 1 / step for step in range(1, 101)}) for each in bits]


# Runs


def test_a_run_has_a_folder_by_all_that_decides_its_outcome(config: Path) -> None:
    first = run_of(config).out
    assert first == run_of(config).out and first != run_of(config, seed=1).out
    config.write_text('{"other": 1}')
    assert first != run_of(config).out


def test_a_run_is_done_when_it_has_measured_after_its_last_step(config: Path) -> None:
    run = run_of(config)
    assert not run.done
    run.out.mkdir(parents=True)
    for said, done in (("", False), ('{"step": 3, "bits_per_byte": 2}', False), ('{"step": 7, "bits_per_byte": 2}', True)):
        (run.out / "quality.json").write_text(said)
        assert run.done is done


def test_a_run_that_was_interrupted_goes_on(config: Path) -> None:
    run = run_of(config)
    assert "--resume" not in run.command
    (run.out / "checkpoints").mkdir(parents=True)
    (run.out / "checkpoints" / "latest").write_text("global_step3")
    assert run.command[-1] == "--resume" and run.command[:4] == [sys.executable, "-m", "shoal", "run"]


def test_what_is_there_is_not_run_again(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commanded(monkeypatch, TRAINED)
    runs, told = [run_of(config), run_of(config, seed=1)], list[str]()
    runs[0].train(told.append)
    assert told == ["step 1/7  loss 2.0 (2.9 bits)"] and runs[0].learned() == Learned(bits=2.5, training={1: 4.0, 2: 3.0})
    told.clear()
    assert train(runs, 2, told.append) == []
    assert told == ["1 of 2 runs are there already", "run 1 of 1, some, seed 1: step 1/7  loss 2.0 (2.9 bits)"]
    assert all(run.done for run in runs) and train(runs, 1, told.append) == []


def test_a_run_that_fails_says_where_and_what_it_said_and_the_others_go_on(config: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run_of(config), run_of(config, seed=1)]
    commanded(monkeypatch, "import sys; sys.exit('no memory') if 'seed0' in {out!r} else None\n" + TRAINED)
    (failure,) = train(runs, 1, lambda text: None)
    assert "some, seed 0: ended with status 1" in failure and "train.log ends: no memory" in failure
    assert [run.done for run in runs] == [False, True]


def test_a_run_that_is_ended_ends_and_does_not_begin_again(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commanded(monkeypatch, "print('step 1', flush=True); import time; time.sleep(600)")
    run, begun = run_of(config), threading.Event()
    failures: list[str] = []

    def attempt() -> None:
        with pytest.raises(RunFailed, match="ended with status -15") as failed:
            run.train(lambda line: begun.set())
        failures.append(str(failed.value))

    thread = threading.Thread(target=attempt)
    thread.start()
    assert begun.wait(300)
    run.end()
    thread.join(300)
    assert len(failures) == 1
    with pytest.raises(RunFailed, match="ended before it began"):
        run.train(lambda line: None)


# What they learned


def test_a_curve_averages_equal_intervals_and_a_band_spans_the_seeds() -> None:
    run = Learned(bits=1.0, training={1: 4.0, 2: 2.0, 3: 1.0, 4: 0.0})
    assert run.curve(points=2) == {2: 3.0, 4: 0.5} and len(run.curve()) == 4
    points = band(learned(2.0, 4.0))
    assert len(points) == 50 and points[-1].step == 100
    assert points[0].low == pytest.approx(2.75) and points[0].middle == pytest.approx(3.75)
    assert points[0].high == pytest.approx(4.75)


def cases(*optimizers: str, hooks: tuple[str, ...] = ()) -> list[Case]:
    ours = [Case(path=Path(f"{name.lower()}.json"), optimizer=name, steps=10) for name in optimizers]
    return ours + [Case(path=Path("adamw.json"), optimizer=DDP, steps=10, hook=hook) for hook in hooks]


def test_a_difference_is_within_a_seed_and_the_promise_beside_adamw() -> None:
    adam, lamb, ours = cases("AdamW", "Lamb", "OneBitLamb")
    found = {adam: learned(2.0, 4.0), lamb: learned(2.5, 5.0), ours: learned(2.5, 5.1)}
    assert percent(found, ours, baseline(found, ours)) == pytest.approx([25, 27.5]) and counterpart(found, ours) is lamb
    assert baseline(found, adam) is adam and percent(found, adam, adam) == []
    laid = outcome(found, ["some run failed"], OPTIONS)
    (target,) = laid.targets
    assert target.what == "OneBitLamb (onebitlamb): bits per byte above AdamW's, the mean over seeds"
    assert target.measured == pytest.approx(26.25) and target.verdict == "**missed**"
    assert laid.sheets[0].rows[2] == ("OneBitLamb (onebitlamb)", "3.8000", "2.5000", "5.1000",
                                      "+26.25 % (+10.37 to +42.13), worse", "+1.00 % (-11.71 to +13.71), not resolved")
    assert laid.note.endswith("some run failed") and json.dumps(laid.raw)


def test_a_way_of_ddp_is_held_against_its_own_adamw() -> None:
    names = ("none", "bf16", "none-nadam", "powersgd-4-nadam")
    adam, plain, bf16, ahead, both = all_of_them = cases("AdamW", hooks=names)
    found = {case: learned(2.0, 2.1) for case in all_of_them}
    assert [baseline(found, case) for case in all_of_them] == [adam, plain, plain, plain, plain]
    assert [counterpart(found, case) for case in all_of_them] == [adam, adam, plain, plain, ahead]
    assert {*names} <= {*BY_NAME} and both.name == "DDP, AdamW, hook powersgd-4-nadam" and bf16.hook == "bf16"


def test_a_verdict_says_what_the_interval_of_seeds_tells() -> None:
    assert verdict([0.1, 0.2, 0.3]) == "equal within 0.5 %" and verdict([-0.3, -0.2, -0.25]) == "better"
    assert verdict([0.4, 0.5, 0.6]) == "worse", "positive beyond doubt, and perhaps beyond the limit"
    assert verdict([0.0, 1.0, 0.5]) == verdict([0.1]) == "not resolved"
    assert text([0.1]) == "+0.10 %, one seed" and text([]) == ""


def test_a_run_under_ddp_has_a_folder_and_a_command_of_its_own(config: Path) -> None:
    plain, hooked = run_of(config), Run(config=config, seed=0, steps=7, model="tiny", ranks=2, folder=config.parent / "runs",
                                        hook="powersgd-1")
    assert plain.out != hooked.out and "ddp_train.py" in hooked.command[6] and "powersgd-1" in hooked.command


def test_the_picture_shows_every_case_and_is_always_the_same(tmp_path: Path) -> None:
    cases = {"AdamW (zero1)": learned(2.0, 2.1), "OneBitAdam (onebit)": learned(2.2)}
    for folder in ("one", "other"):
        files = [tmp_path / folder / f"curves.{kind}" for kind in ("png", "svg")]
        picture(cases, files, title="learning")
    text = files[1].read_text()
    assert "learning" in text and "OneBitAdam" in text and text == (tmp_path / "one" / "curves.svg").read_text()


def test_the_example_has_the_same_training_with_both_optimizers() -> None:
    adam, onebit = (Case.read(GPT / name, None) for name in ("zero1.json", "onebit.json"))
    assert (adam.optimizer, onebit.optimizer) == ("AdamW", "OneBitAdam") and adam.steps == onebit.steps == 1000
    assert COUNTERPARTS[onebit.optimizer] == adam.optimizer
    assert Case.read(GPT / "onebit.json", 30).steps == 30
