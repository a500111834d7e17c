"""The communication benchmark compares bytes and speeds with formulas and targets, and times packing."""

from __future__ import annotations

import json
import runpy
import sys
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, cast

import pytest
import torch
from catalogue import BY_SYSTEM, COMPRESSED, COMPRESSING, FREEZE, SYSTEMS, THROUGH, exact_share
from communication import CHOICES, Results, collected, draw, outcome, targets
from ddp_hooks import power_sgd_elements
from hosts import Hosts, Traffic, unavailable
from interleave import Count, Plan, Team, Turn
from packing import Packing
from rate_curves import Point, ratios
from speeds import curve, groups, interface, round_times, sent
from sweep import WORDS, Cell, Found, sweep, take_turn
from whole_training import Through, through
from workloads import parameters

from shoal.onebit import packed_bytes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PLAN = Plan(workload="30m", ranks=2, rounds=2, steps=0, warm=2 * FREEZE, microbatch=2)
TINY = Plan(workload="tiny", ranks=2, rounds=1, steps=0, warm=2 * FREEZE, microbatch=1, length=16)
RATES = ("200mbit", "1gbit")
TRAINED = Through(rate="200mbit", seconds={"ddp": [6.0] * 20, "onebit-adam-1-through": [6.0] * 3 + [1.0] * 17}, failures={})
SECONDS = {"ddp": (6.0, 1.5), "shoal-1": (6.0, 1.5), "onebit-adam-1": (1.0, 0.75)}  # of a step, by rate


def found(**failures: str) -> Found:
    """Return what a sweep of three systems might find: twice the time in the second round."""
    cells = [Cell(system=name, rate=rate, seconds=[[second, second], [2 * second] * 3], sent=[1.01 * sent(name, PLAN)] * 2,
                  payload=[1e6, 1e6], state=[0.0, 0.0], words=[32.0, 32.0], packing=[0.04, 0.08])
             for name, seconds in SECONDS.items() for rate, second in zip(RATES, seconds, strict=True)
             if name not in failures]
    return Found(cells=cells, failures=failures, losses=dict.fromkeys(set(SECONDS) - set(failures), 5.0))


def results(**failures: str) -> Results:
    return collected([found(**failures)], PLAN, tuple(SECONDS), RATES, TRAINED)


# The systems


def test_every_compressing_optimizer_has_a_warm_up_system() -> None:
    assert set(COMPRESSED) <= set(CHOICES) and set(COMPRESSED) <= set(SYSTEMS)
    assert {system.warm_up for system in COMPRESSED.values()} <= set(SYSTEMS)
    assert len(COMPRESSED) == sum(len(row.stages) for row in COMPRESSING.values())
    assert SYSTEMS["onebit-adam-1"].stage == 1 and SYSTEMS["onebit-adam-1"].warm_up == "shoal-1"


def test_speed_and_quality_have_the_schedule_of_one_configuration() -> None:
    assert BY_SYSTEM["onebit-adam-1"].schedule(300) == {"freeze_step": 6}
    assert BY_SYSTEM["zeroone-adam-1"].schedule(300)["var_update_scaler"] == 4 * 300 // 1000
    assert (exact_share("onebit-adam-1", 300), exact_share("onebit-lamb-1", 1000)) == (0.02, 0.15)
    assert 0.02 < exact_share("zeroone-adam-1", 300) < 0.05, "gradients of some steps, weights of fewer"
    assert exact_share("ddp-powersgd-1", 300) == 2 / 300 and exact_share("ddp-bf16") == 0.0
    assert exact_share("ddp-local", 300) == 0.15 and exact_share("torch-pipeline-1f1b") == 0.0


# Bytes and speeds


def test_power_sgd_sends_two_factors_of_each_matrix_that_they_shrink() -> None:
    shapes = [torch.Size(shape) for shape in ((64, 32), (3, 4), (7,), (8, 4, 4))]
    assert power_sgd_elements(shapes, 4) == (64 + 32) * 4 + 12 + 7 + 128, "twice the factors must be fewer elements"
    assert power_sgd_elements(shapes, 1) == 64 + 32 + 12 + 7 + 8 + 16
    assert sent("ddp-local", PLAN) == sent("ddp", PLAN) / 4
    assert sent("ddp-powersgd-1", PLAN) < sent("onebit-adam-0", PLAN) < sent("ddp-bf16", PLAN)


def test_one_that_compresses_sends_signs_of_as_many_elements() -> None:
    assert sent("onebit-adam-0", PLAN) == sent("onebit-adam-1", PLAN) == 2 * packed_bytes(parameters("30m") // 2)
    assert sent("ddp", PLAN) / sent("onebit-adam-0", PLAN) == pytest.approx(31.5, abs=0.02)


def test_times_is_a_ratio_within_a_round_and_a_warm_up_has_its_share() -> None:
    assert round_times(found(), "onebit-adam-1", "200mbit") == pytest.approx([6.0, 6.0])
    assert round_times(found(), "onebit-adam-1", "1gbit") == pytest.approx([2.0, 2.0])
    expected = 6 / (0.15 * 6 + 0.85 * 1)
    assert round_times(found(), "onebit-adam-1", "200mbit", warm_up=0.15) == pytest.approx([expected, expected])


def test_samples_a_second_and_their_ratios_are_by_rate() -> None:
    slow, fast = curve(found(), "onebit-adam-1", PLAN, RATES)
    assert (slow.low, slow.middle, slow.high) == (2.0, 3.0, 4.0) and fast.high == pytest.approx(16 / 3)
    (ratio,) = ratios([slow], [Point(rate="200mbit", middle=0.5, low=0.1, high=9.0), fast])
    assert ratio == Point(rate="200mbit", middle=6.0, low=4.0, high=8.0)
    assert interface(found(), "ddp") == pytest.approx(1.01 * sent("ddp", PLAN))


# Groups


def test_systems_are_grouped_by_memory_each_with_ddp_and_its_warm_ups() -> None:
    names = ("ddp", "ddp-fp16", "shoal-0", "shoal-1", "onebit-adam-0", "onebit-adam-1")
    assert groups(names, 6) == [list(names)]
    assert groups(names, 4) == [["ddp", "ddp-fp16", "shoal-0", "shoal-1"],
                                ["ddp", "shoal-0", "onebit-adam-0"], ["ddp", "shoal-1", "onebit-adam-1"]]
    assert groups(names[1:3], 1) == [["ddp-fp16"], ["shoal-0"]]
    assert groups(("onebit-adam-1",), 1) == [["onebit-adam-1"]]


def test_a_ratio_is_taken_within_the_group_of_a_system() -> None:
    other = Found(cells=[Cell(system=name, rate=rate, seconds=[[10.0]], sent=[1.0]) for name in ("ddp", "shoal-0")
                         for rate in RATES], failures={"shoal-1": "died"}, losses={"ddp": 5.0, "shoal-0": 5.0})
    both = collected([other, found()], PLAN, ("ddp", "shoal-0", *SECONDS), RATES, TRAINED)
    assert both.found["shoal-0"] is other and both.found["onebit-adam-1"].cell("shoal-1", "1gbit")
    assert round_times(both.found["shoal-0"], "shoal-0", "1gbit") == [1.0] and both.ends("onebit-adam-1")
    assert both.found["ddp"] is other  # of those in several, the first


class Alternating:
    """A team, and its hosts, whose every third step takes five times as long and alone sends anything."""

    count = 1

    def __init__(self) -> None:
        self.done = 0

    def steps(self, number: int) -> Turn:
        seconds = [5.0 if step % 3 == 2 else 1.0 for step in range(self.done, self.done + number)]
        self.done += number
        return Turn(seconds=seconds, cpu=0.0, faults=0.0, loss=1.0, sent=[], packing=[0.1 * each for each in seconds])

    def counts(self) -> list[Count]:
        sent = 300 * (self.done // 3)
        return [Count(sockets=sent + 10, kinds={"reduce": sent, "words": 4 * self.done})]

    def bytes(self, host: int) -> Traffic:
        return Traffic(sent=330 * (self.done // 3), received=0)


def test_where_steps_are_not_alike_a_step_is_the_mean_of_its_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYSTEMS, "alternating", replace(SYSTEMS["ddp"], period=3))
    both = Alternating()
    team = types.SimpleNamespace(steps=both.steps, count=both.counts)
    cell = Cell(system="alternating", rate="1gbit")
    take_turn(cast(Team, team), 3, cast(Hosts, both), cell)
    assert both.done == 9 and cell.seconds == [[7 / 3, 7 / 3]]
    assert (cell.sent, cell.payload, cell.state, cell.words) == ([110.0], [100.0], [100.0], [4.0])
    assert cell.packing == [pytest.approx(0.1)]


def test_power_sgd_is_measured_at_two_schedules() -> None:
    cells = [replace(cell, system="ddp-powersgd-1") for cell in found().cells if cell.system == "onebit-adam-1"]
    both = Found(cells=[*found().cells, *cells], failures={}, losses={**found().losses, "ddp-powersgd-1": 5.0})
    gathered = collected([both], PLAN, (*SECONDS, "ddp-powersgd-1"), RATES, TRAINED)
    assert [each for each in gathered.trainings if each[0] == "ddp-powersgd-1"] == [
        ("ddp-powersgd-1", "", 2 / 300), ("ddp-powersgd-1", "-late", 0.15)]
    assert ("onebit-adam-1", "", 0.02) in gathered.trainings and ("shoal-1", "", 0.0) in gathered.trainings


# Promises


def test_targets_are_of_the_compressing_systems_with_their_measurements() -> None:
    verdicts = {target.what.partition(": ")[2]: target for target in targets(results())}
    assert [target.what for target in targets(results()) if "OneBitAdam" not in target.what] == []
    assert verdicts["times fewer bytes than 16-bit gradients and weights"].measured == pytest.approx(15.75 / 1.01, abs=0.02)
    assert verdicts["packing and unpacking, of the step, at the rate where that is most"].measured == pytest.approx(6.0)
    measured = [target.measured for target in verdicts.values()]
    assert len(measured) == 5 and all(target.met for target in targets(results()))
    speeds = [target for target in targets(results()) if "DDP" in target.what]
    assert [target.low for target in speeds] == [1.0, 3.0] and speeds[-1].measured == pytest.approx(120 / 35)


def test_without_ddp_nothing_is_said_of_times_ddp() -> None:
    died = replace(results(ddp="rank 0: it died"), trained=Through(rate="200mbit", seconds={}, failures={}))
    whats = [target.what for target in targets(died)]
    assert whats and not [what for what in whats if "DDP" in what]
    laid = outcome(died, [found(ddp="rank 0: it died")], seconds=1.0)
    assert "DDP: rank 0: it died." in laid.note and all("Times DDP" not in sheet.title for sheet in laid.sheets)


def test_what_was_found_becomes_a_page_with_its_picture(tmp_path: Path) -> None:
    draw(results(), tmp_path)
    outcome(results(), [found()], seconds=1.0, pictures=("communication.svg",)).publish(tmp_path / "found.json")
    render = runpy.run_path(str(BENCHMARKS / "render_page.py"))["render"]
    page = render(json.loads((tmp_path / "found.json").read_text()))
    assert "![communication](images/communication.svg)" in page and "at least 3" in page and "**Targets**" in page
    assert "times as fast as DDP" in (tmp_path / "communication.svg").read_text()


# Packing


def test_what_a_package_promises_is_timed_and_does_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("shoal.onebit")
    vars(package).update(__all__=["BLOCK", "pack"], BLOCK=2048, pack=lambda number, *, more=0: number + more)
    monkeypatch.setitem(sys.modules, "shoal.onebit", package)
    packing = Packing()
    packing.watch()
    before = packing.seconds
    assert before == 0.0 and vars(package)["pack"](1, more=2) == 3 and vars(package)["BLOCK"] == 2048
    assert packing.seconds > before


def test_without_the_package_there_is_nothing_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shoal.onebit")
    packing = Packing()
    packing.watch()
    assert packing.seconds == 0.0


@pytest.mark.skipif(bool(missing := unavailable()), reason=f"no hosts: {missing}")
def test_between_hosts_a_compressed_step_sends_what_the_formula_says() -> None:
    names = ("shoal-1", "onebit-adam-1")
    sends = {name: sent(name, TINY) for name in names}
    with Hosts(2) as hosts:
        swept = sweep(names, TINY, ("50mbit",), hosts, sends=sends, seconds=0.1, tell=lambda text: None)
    assert not swept.failures
    exact, ours = (swept.cell(name, "50mbit") for name in names)
    assert exact and ours and exact.state[0] == sends["shoal-1"] and exact.packing == [0.0] and 0 < ours.packing[0] < 1
    assert sends["onebit-adam-1"] <= ours.state[0] < 1.01 * sends["onebit-adam-1"]  # each unit is rounded up
    assert ours.words == exact.words and ours.state[0] < ours.payload[0] < ours.sent[0] < 1.5 * ours.state[0]
    assert exact.state[0] < exact.payload[0] < exact.sent[0] < 1.05 * exact.state[0]  # not twice what was refused


class Counting(Team):
    """A team that counts the bytes of gradients and weights that rank 0 sends in each step."""

    sent: ClassVar[dict[str, list[int]]] = {}

    def steps(self, count: int) -> Turn:
        turns, sent = list[Turn](), [self._state()]
        for _ in range(count):
            turns.append(super().steps(1))
            sent.append(self._state())
        self.sent[self.result.name] = [after - before for before, after in pairwise(sent)]
        return replace(turns[-1], seconds=[second for turn in turns for second in turn.seconds])

    def _state(self) -> int:
        return sum(size for kind, size in self.count()[0].kinds.items() if kind != WORDS)


@pytest.mark.skipif(bool(missing), reason=f"no hosts: {missing}")
def test_a_training_from_its_first_step_warms_up_and_then_compresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whole_training.Team", Counting)
    with Hosts(2) as hosts:
        trained = through(("ddp", "onebit-adam-1"), TINY, "unlimited", hosts, lambda text: None)
    assert not trained.failures and {len(seconds) for seconds in trained.seconds.values()} == {THROUGH}
    assert trained.compared == ["onebit-adam-1-through"]
    warm = BY_SYSTEM["onebit-adam-1"].schedule(THROUGH)["freeze_step"]
    state = Counting.sent["onebit-adam-1-through"]
    assert state[:warm] == [sent("shoal-1", TINY)] * warm
    least = sent("onebit-adam-1", TINY)
    assert all(least <= each < 1.01 * least for each in state[warm:])  # each unit is rounded up
