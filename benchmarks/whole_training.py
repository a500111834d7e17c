"""Trainings from their first step to their last over a slow link: what a warm-up that travels whole costs in the end.

Each system trains alone on the hosts, as many steps as the others, and every step counts. The link is slow from the first
step on; models are built before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import link
from catalogue import BASELINE, FROM_THE_START, SYSTEMS, THROUGH
from hosts import Hosts
from interleave import Plan, Team, TeamFailed
from results import Sheet, Target
from sweep import settled


@dataclass(frozen=True, slots=True, kw_only=True)
class Through:
    """Seconds of each step of each system's training at one rate, by name, and why others failed."""

    rate: str
    seconds: dict[str, list[float]]
    failures: dict[str, str]

    @property
    def raw(self) -> dict[str, Any]:
        return asdict(self)

    def times(self, name: str) -> float:
        """Return the speed of a system's training relative to DDP."""
        return sum(self.seconds[BASELINE]) / sum(self.seconds[name])

    @property
    def compared(self) -> list[str]:
        """The systems that trained, if DDP did."""
        return [name for name in self.seconds if name != BASELINE] if BASELINE in self.seconds else []

    def sheet(self, samples: int) -> Sheet:
        """Lay the trainings side by side, `samples` a step."""
        rows = [(SYSTEMS[name].title, f"{sum(seconds):.1f}", f"{samples * len(seconds) / sum(seconds):.2f}",
                 f"{self.times(name):.2f}" if name in self.compared else "") for name, seconds in self.seconds.items()]
        return Sheet(title=f"{THROUGH} steps at {self.rate}, the first of them warm-up", rows=tuple(rows),
                     columns=("system", "seconds", "samples a second", "times DDP"))

    def targets(self, least: float) -> list[Target]:
        """Return what each is promised to be at least, in times of DDP, and was."""
        return [Target(what=f"{SYSTEMS[name].title}, at {self.rate}, run: times as fast as DDP",
                       low=least, high=float("inf"), measured=self.times(name)) for name in self.compared]


def through(systems: Sequence[str], plan: Plan, rate: str, hosts: Hosts, tell: Callable[[str], None]) -> Through:
    """Train DDP, and those of `systems` that compress from their first step on, one after the other at `rate`."""
    chosen = [f"{name}-through" for name in systems if f"{name}-through" in FROM_THE_START]
    found = Through(rate=rate, seconds={}, failures={})
    for name in [BASELINE, *chosen] if BASELINE in systems and chosen else []:
        tell(f"{rate}: {name}, {THROUGH} steps from the first")
        hosts.set_rate(link.UNLIMITED)
        with tempfile.TemporaryDirectory(prefix="through-") as folder:
            team = Team(name, replace(plan, warm=0), peer=False, folder=Path(folder), start=hosts.popen)
            try:
                team.built()
                settled(hosts)
                hosts.set_rate(rate)
                found.seconds[name] = team.steps(THROUGH).seconds
            except TeamFailed as error:
                found.failures[name] = str(error)
            finally:
                team.stop()
    return found
