"""The verdicts of the chaos run and of lost nodes: what a wrong recovery looks like is missed, each by its own target."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import faults
import node_loss
import pytest
from chaos_view import Losses
from faults import FAULTS, SIGNALS, Recovery, Survival, exact_targets, times
from node_loss import LAST, Notes

OPTIONS = argparse.Namespace(every=10, faults=1)
RECOVERY = Recovery(kind="kill", step=35, noticed=0.1, started=0.3, joined=0.4, back=0.5, new=1.5, redone=5, alive=30,
                    loaded=30, source="memory", committing=1)
SURVIVAL = Survival(asked=1, recoveries=[], hangs=0, orphans=0, same=True, unlike=0, noted=100, steps=100)


def missed(recovery: Recovery = RECOVERY, survival: Survival = SURVIVAL) -> list[str]:
    """Return the first word of each target that is missed."""
    targets = [*exact_targets(OPTIONS, [survival], [recovery]), *times(OPTIONS, [recovery])]
    return [target.what for target in targets if not target.met]


def test_a_good_recovery_meets_every_target() -> None:
    assert missed() == []
    assert missed(replace(RECOVERY, kind="agent", loaded=0, source="disk", redone=35)) == []
    assert missed(replace(RECOVERY, kind="disk", loaded=20, alive=20, redone=90)) == []
    assert missed(replace(RECOVERY, kind="flip", loaded=20, alive=20, redone=15)) == []


@pytest.mark.parametrize(("change", "what"), [
    ({"loaded": 20, "redone": 15}, "restarts from an older state than the newest intact copy"),
    ({"loaded": 20, "redone": 12, "source": "disk"}, "restarts that read the disk though a newer copy was in memory"),
    ({"redone": 12}, "steps again beyond 10 (20 with a damaged copy): those that a copy takes"),
    ({"redone": 20}, "steps again without damage to copies, less than 2 x 10"),
    ({"new": 3.5}, "SIGKILL to the next new step, median of 1"),
    ({"new": 5.5}, "SIGKILL to the next new step, 95th percentile of 1"),
    ({"kind": "hang", "noticed": 6.5}, "SIGSTOP or an idle hang noticed, longest"),
    ({"kind": "spin", "noticed": 55.0}, "a hang that uses the processor noticed, longest"),
])  # fmt: skip
def test_a_recovery_that_breaks_a_promise_misses_its_target(change: dict[str, object], what: str) -> None:
    assert what in missed(replace(RECOVERY, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(("change", "what"), [
    ({"unlike": 1}, "losses that are not, of 100 steps"), ({"noted": 98}, "steps whose loss is not known"),
    ({"orphans": 1}, "orphans"), ({"hangs": 1}, "hangs"), ({"same": False}, "weights are bitwise"),
    ({"asked": 2}, "faults survived"),
])  # fmt: skip
def test_a_job_that_breaks_a_promise_misses_its_target(change: dict[str, object], what: str) -> None:
    (found,) = missed(survival=replace(SURVIVAL, **change))  # type: ignore[arg-type]
    assert found.startswith(what)


def test_each_fault_that_a_rank_commits_has_a_signal_of_its_own() -> None:
    assert set(SIGNALS) < set(FAULTS) and len(set(SIGNALS.values())) == len(SIGNALS)


def test_the_newest_copy_is_the_one_of_most_steps(tmp_path: Path) -> None:
    assert faults.newest_copy(tmp_path) == -1
    for name in ("step90", "step100", ".step110"):
        (tmp_path / "vault0" / name).mkdir(parents=True)
    assert faults.newest_copy(tmp_path) == 100


def test_a_loss_that_differs_in_its_last_bit_once_is_found(tmp_path: Path) -> None:
    def read(name: str, *lines: str) -> Losses:
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        losses = Losses(tmp_path / name)
        losses.read()
        return losses

    plain = read("plain", "1.0 1 4.0", "2.0 2 3.0", "3.0 3 2.0")
    assert read("same", "1.0 1 4.0", "2.0 2 3.0", "3.0 2 3.0").unlike(plain) == []
    assert read("other", "1.0 1 4.0", "2.0 2 3.0000000000000004", "3.0 2 3.0").unlike(plain) == [2]


# Lost nodes


def noted(folder: Path, *, ranks_after: int = 3, from_step: int = 21, shift: float = 0.0, repeat: int = 0) -> Notes:
    """Write and read the notes of a job that goes on from `from_step`, perhaps with fewer ranks and samples used before."""
    folder.mkdir()
    lines: list[str] = []
    for ranks, steps in ((3, range(1, 21)), (ranks_after, range(from_step, LAST + 1))):
        for step in steps:
            late = ranks < 3
            samples = [6 * (step - (repeat if late else 0)) + number for number in range(6)]
            for rank in range(ranks):
                some = " ".join(map(str, samples[rank::ranks]))
                lines.append(f"takes {step} {ranks} {rank} {1.0 / step + (shift if late else 0.0)} {some}")
            lines.append(f"has {step} {ranks} {100.0 + step + (10 if late else 0)} 7")
    (folder / "notes").write_text("\n".join(lines) + "\ntakes 4")
    return Notes.read(folder)


def test_what_a_lost_node_costs_is_read_from_the_notes(tmp_path: Path) -> None:
    plain = noted(tmp_path / "plain")
    found = node_loss.loss(noted(tmp_path / "lost", ranks_after=2, from_step=20), plain, 120.0, 0)
    assert (found.back, found.new, found.again, found.difference, found.once) == (10.0, 11.0, 1, 0.0, True)


def test_a_sample_used_twice_and_a_loss_that_differs_are_found(tmp_path: Path) -> None:
    plain = noted(tmp_path / "plain")
    assert not noted(tmp_path / "twice", ranks_after=2, repeat=1).once(plain)
    assert noted(tmp_path / "rounded", ranks_after=2, shift=1e-9).difference(plain) == pytest.approx(4e-8, rel=0.1)
    plain.losses[3, 3][1] += 1e-12
    assert noted(tmp_path / "bits", ranks_after=2).difference(plain) == float("inf")
