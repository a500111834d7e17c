"""Systems take turns on hosts, at one rate of their links after the other: how fast a step is, and what it sends.

One rank of every system lives on each host through the whole sweep. In a round the rate is set once for all systems, and
each takes a turn at it. A turn begins and ends when the interfaces stand still, so that what a system sends late, after its
step has returned, is its own and slows no other. As many steps make a turn as the time for it allows. Where a
system's steps are not alike a step stands for the mean of one period of them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import link
from catalogue import SYSTEMS
from hosts import Hosts, Traffic
from interleave import Plan, Team, TeamFailed

WORDS = "words"  # the kind of this library's traffic that moves neither gradients nor weights
QUIET = 0.3  # seconds in which nothing is sent, after which nothing will be
FEWEST, MOST = 2, 8  # counted steps of a turn
CARRIED = 0.95  # of a rate, by TCP


def add_arguments(parser: argparse.ArgumentParser, rates: Sequence[str]) -> None:
    """Declare what every sweep can be told: the links, the turns, and the model."""
    parser.add_argument("--rates", nargs="+", default=rates, metavar="RATE", help=f"of the links ({' '.join(rates)})")
    parser.add_argument("--delay", help="of each link, each way: 5ms ... (none; needs sch_netem)")
    parser.add_argument("--hosts", type=int, default=2, help="how many, with one rank each (2)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system at each rate (3)")
    parser.add_argument("--seconds", type=float, default=15.0,
                        help=f"of a turn, in which at least {FEWEST} steps are counted (15)")
    parser.add_argument("--model", default="30m", help="preset of examples/gpt/model.py (30m)")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence (128)")


@dataclass(slots=True, kw_only=True)
class Cell:
    """Measurements of one system at one rate, by round: seconds of each counted step, bytes per step of the busiest host."""

    system: str
    rate: str
    seconds: list[list[float]] = field(default_factory=list[list[float]])
    sent: list[float] = field(default_factory=list[float])
    """Bytes on the interface."""
    payload: list[float] = field(default_factory=list[float])
    """Bytes that TCP carried of them, by the kernel's count of the rank's sockets."""
    state: list[float] = field(default_factory=list[float])
    """Payload of gradients and weights, as this library counts it itself; 0 for other systems."""
    words: list[float] = field(default_factory=list[float])
    """Payload of what ranks agree on beside them: norms, flags."""
    packing: list[float] = field(default_factory=list[float])
    """Share of the counted steps' time that went into packing and unpacking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Measurements of all systems, and the errors of those that failed."""

    cells: list[Cell]
    failures: dict[str, str]
    losses: dict[str, float]
    """Of each system after as many steps, those before the first turn."""

    def cell(self, system: str, rate: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.system, cell.rate) == (system, rate) and cell.sent), None)


def sweep(names: Sequence[str], plan: Plan, rates: Sequence[str], hosts: Hosts, *, sends: Mapping[str, float],
          seconds: float, tell: Callable[[str], None]) -> Found:
    """Run the named systems of `plan` on `hosts`, one rank each, at every rate in every round.

    `sends` are the bytes that a step of each system is expected to send, from which follows how many steps take about
    `seconds`. A system that fails keeps the reason and the others go on. `tell` receives progress as text.
    """
    failures: dict[str, str] = {}
    cells = {(name, rate): Cell(system=name, rate=rate) for name in names for rate in rates}
    hosts.set_rate(link.UNLIMITED)
    with _teams(names, plan, hosts, failures, tell) as teams:
        for number in range(plan.rounds):
            for rate in rates:
                hosts.set_rate(rate)
                for team in _rotated(teams, number):
                    name = team.result.name
                    expected, period = _expected(team, sends[name], rate), SYSTEMS[name].period
                    periods = 1 + max(FEWEST, min(MOST, round(seconds / expected / period)))
                    tell(f"round {number + 1} of {plan.rounds}, {rate}: {name}, {periods * period} steps in about "
                         f"{periods * period * expected:.0f} s")
                    with _fails(team, teams, failures):
                        take_turn(team, periods, hosts, cells[name, rate])
        losses = {team.result.name: team.warm.loss for team in teams if team.warm}
    return Found(cells=list(cells.values()), failures=failures, losses=losses)


@contextmanager
def _teams(names: Sequence[str], plan: Plan, hosts: Hosts, failures: dict[str, str],
           tell: Callable[[str], None]) -> Generator[list[Team], None, None]:
    """Start the systems one after the other, and end them whatever happens."""
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        teams: list[Team] = []
        try:
            for name in names:
                tell(f"{name}: starting")
                teams.append(Team(name, plan, peer=False, folder=Path(folder), start=hosts.popen))
                with _fails(teams[-1], teams, failures):
                    teams[-1].ready()
            yield teams
        finally:
            for team in teams:
                team.stop()


@contextmanager
def _fails(team: Team, teams: list[Team], failures: dict[str, str]) -> Generator[None, None, None]:
    """Let a team that fails go, and keep the reason."""
    try:
        yield
    except TeamFailed as error:
        team.stop()
        teams.remove(team)
        failures[team.result.name] = str(error)


def take_turn(team: Team, periods: int, hosts: Hosts, cell: Cell) -> None:
    """Run so many periods of steps; the first finds cold caches and nothing on its way, so its time is not counted."""
    period = SYSTEMS[cell.system].period
    steps = periods * period
    before, counted = settled(hosts), team.count()
    turn = team.steps(steps)
    moved = [now - earlier for now, earlier in zip(settled(hosts), before, strict=True)]
    ranks = list(zip(counted, team.count(), strict=True))
    kinds = [{kind: now.kinds[kind] - earlier.kinds.get(kind, 0) for kind in now.kinds} for earlier, now in ranks]
    cell.seconds.append([statistics.fmean(turn.seconds[start:start + period]) for start in range(period, steps, period)])
    cell.sent.append(max(host.sent for host in moved) / steps)
    cell.payload.append(max(now.sockets - earlier.sockets for earlier, now in ranks) / steps)
    cell.state.append(max(sum(size for kind, size in rank.items() if kind != WORDS) for rank in kinds) / steps)
    cell.words.append(max(rank.get(WORDS, 0) for rank in kinds) / steps)
    cell.packing.append(sum(turn.packing[period:]) / sum(turn.seconds[period:]))


def settled(hosts: Hosts, quiet: float = QUIET) -> list[Traffic]:
    """Return what each host has sent and received, once that has not changed for `quiet` seconds."""
    found, since = [hosts.bytes(host) for host in range(hosts.count)], time.monotonic()
    while time.monotonic() - since < quiet:
        time.sleep(quiet / 6)
        now = [hosts.bytes(host) for host in range(hosts.count)]
        if now != found:
            found, since = now, time.monotonic()
    return found


def _rotated(teams: Sequence[Team], number: int) -> list[Team]:
    shift = number % max(1, len(teams))
    return [*teams[shift:], *teams[:shift]]


def _expected(team: Team, sends: float, rate: str) -> float:
    """Estimate the seconds of a step: as long as without a limit, and its bytes at the rate."""
    assert team.warm
    bits = link.rate(rate)
    return team.warm.seconds[-1] + (8 * sends / (CARRIED * bits) if bits else 0.0)
