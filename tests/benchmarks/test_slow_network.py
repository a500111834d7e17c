"""Systems that take turns on hosts move the bytes of their formulas, and curves cross where they do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hosts import Hosts, unavailable
from interleave import Plan
from rate_curves import Point, crossover, picture, where
from speeds import sent
from sweep import sweep
from torch import nn
from workloads import parameters, workload

RATES = ("100mbit", "1gbit", "unlimited")
TINY = Plan(workload="tiny", ranks=2, rounds=1, steps=0, warm=1, microbatch=2, length=32, pieces=2)


def curve(*speeds: float) -> list[Point]:
    return [Point(rate=rate, middle=speed, low=speed, high=speed) for rate, speed in zip(RATES, speeds, strict=True)]


# Curves


def test_curves_cross_where_their_ratio_passes_one() -> None:
    ours, theirs = curve(10, 10, 10), curve(1, 100, 50)
    assert crossover(ours, theirs) == pytest.approx(10 ** 8.5)  # as far below at 100 Mbit/s as above at 1 Gbit/s
    assert where(ours, theirs) == "316 Mbit/s"
    assert crossover(curve(10, 10, 10), curve(1, 10, 50)) == pytest.approx(1e9)


def test_curves_that_do_not_cross_are_said_not_to() -> None:
    assert where(curve(10, 10, 10), curve(1, 2, 3)) == "nowhere"
    assert where(curve(1, 2, 3), curve(10, 10, 10)) == "everywhere"
    assert where(curve(10, 10, 10), curve(1, 2, 30)) == "unlimited"
    assert crossover(curve(10, 10, 10), curve(1, 2, 30)) is None


def test_the_picture_is_drawn_in_both_kinds_and_always_the_same(tmp_path: Path) -> None:
    curves = {"ours": curve(10, 11, 12), "theirs": curve(1, 20, 50)}
    for folder in ("one", "other"):
        files = [tmp_path / folder / f"curves.{kind}" for kind in ("png", "svg")]
        picture(curves, files, title="two curves", crossing=5e8)
    assert files[0].read_bytes().startswith(b"\x89PNG")
    text = files[1].read_text()
    assert all(word in text for word in ("two curves", "ours", "theirs", "500 Mbit/s", "limit"))
    assert text == (tmp_path / "one" / "curves.svg").read_text()


# Bytes


def test_data_parallel_sends_the_model_and_a_pipeline_its_activations() -> None:
    model = 4 * parameters("tiny")
    assert sent("ddp", TINY) == sent("shoal-1", TINY) == sent("shoal-2", TINY) == model
    assert sent("ddp-fp16", TINY) == model / 2
    assert sent("shoal-3", TINY) == 1.5 * model
    assert sent("shoal-pipeline-1f1b", TINY) == 2 * 2 * 32 * 64 * 4  # ranks, sequences each, tokens, elements, bytes


def test_the_chain_of_the_gpt_is_the_gpt() -> None:
    task = workload("tiny", length=32)
    torch.manual_seed(0)
    model = task.build()
    inputs, _ = task.batch(0, 0)
    chain = nn.Sequential(*task.chain(model))
    assert torch.equal(chain(inputs), model(inputs))
    assert sum(each.numel() for each in chain.parameters()) == parameters("tiny")
    assert chain[0](inputs).nbytes == task.link_bytes


@pytest.mark.skipif(bool(missing := unavailable()), reason=f"no hosts: {missing}")
def test_a_sweep_counts_bytes_by_rate_and_outlives_a_system_that_fails() -> None:
    told: list[str] = []
    sends = {"ddp": sent("ddp", TINY), "shoal-9": 1.0}
    with Hosts(2) as hosts:
        found = sweep(("ddp", "shoal-9"), TINY, ("50mbit", "unlimited"), hosts, sends=sends, seconds=0.1, tell=told.append)
    assert list(found.failures) == ["shoal-9"] and "KeyError" in found.failures["shoal-9"]
    assert list(found.losses) == ["ddp"]
    assert found.cell("shoal-9", "50mbit") is None
    for rate in ("50mbit", "unlimited"):
        cell = found.cell("ddp", rate)
        assert cell and len(cell.seconds) == 1 and len(cell.seconds[0]) >= 2
        assert 1 <= cell.sent[0] / sends["ddp"] < 1.1
    assert told[-1].startswith("round 1 of 1, unlimited: ddp, ")
