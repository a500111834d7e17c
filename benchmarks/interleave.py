"""Systems take turns on one machine, so that whatever slows the machine slows them all.

A `Team` is the ranks of one system: processes that live through the whole measurement and sleep between their turns. In
each round every team runs its steps, in an order that rotates from round to round. A round gives one median per system,
and ratios are taken within the round; what is reported is the median over rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from machine import PEERS, peer_environment

WORKER = Path(__file__).with_name("worker.py")
PROCESS = 500 << 20  # bytes of a rank beside the model: torch, activations, communication buffers
PARAMETER = 24  # bytes a parameter in training: weight, gradient, two moments, and room for two copies


class TeamFailed(RuntimeError):
    """A rank of a system did not start or died; the message is its last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The work of every system: `steps` a turn (the first is not counted), `rounds` turns."""

    workload: str
    ranks: int
    rounds: int
    steps: int
    warm: int
    microbatch: int = 2
    length: int = 128
    pieces: int = 1


class Start(Protocol):
    """Starts a rank, with more variables in its environment; `streams` are those of Popen."""

    def __call__(self, rank: int, command: Sequence[str | Path], /, *, env: Mapping[str, str],
                 **streams: Any) -> subprocess.Popen[str]: ...


def here(rank: int, command: Sequence[str | Path], *, env: Mapping[str, str], **streams: Any) -> subprocess.Popen[str]:
    """Start a rank on this machine; ranks meet over loopback."""
    return subprocess.Popen(list(map(str, command)), env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **env}, **streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Measurements of one turn: seconds of the slowest rank by step, means over ranks by step, the last loss."""

    seconds: list[float]
    cpu: float
    faults: float
    loss: float
    sent: list[dict[str, int]]
    """Bytes that each rank had sent by sockets and by memory before the turn."""
    packing: list[float]
    """Seconds of packing and unpacking within each step, of the rank where they were most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Bytes that a rank has sent so far: payload of its sockets, and what this library counts of it itself, by kind."""

    sockets: int
    kinds: dict[str, int]


@dataclass(slots=True, kw_only=True)
class Result:
    """Measurements of one system. Seconds are those of the slowest rank, by round and step; bytes are of one rank."""

    name: str
    parameters: int = 0
    rounds: list[list[float]] = field(default_factory=list[list[float]])
    cpu: list[float] = field(default_factory=list[float])
    faults: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])
    sockets: list[float] = field(default_factory=list[float])
    memory: list[float] = field(default_factory=list[float])
    peak: int = 0
    resting: int = 0
    failure: str = ""

    @property
    def medians(self) -> list[float]:
        """Seconds of the median step of each round, its first step left out."""
        return [statistics.median(steps[1:] or steps) for steps in self.rounds]

    @property
    def best(self) -> float:
        """Seconds of the fastest counted step."""
        return min(min(steps[1:] or steps) for steps in self.rounds)

    def ratios(self, other: Result) -> list[float]:
        """Seconds of this system in units of the other's, round by round."""
        return [mine / theirs for mine, theirs in zip(self.medians, other.medians, strict=False)]

    def psi(self, ranks: int) -> float:
        """Bytes that a rank sent in a step, in units of the fp32 model times 2 (N-1)/N (1.0 is one all-reduce)."""
        sent = [sockets + memory for sockets, memory in zip(self.sockets, self.memory, strict=True)]
        return max(sent, default=0.0) / (4 * self.parameters * 2 * (ranks - 1) / ranks) if ranks > 1 else 0.0

    @property
    def by_memory(self) -> float:
        """How much of what was sent other ranks read from memory, without a socket; 0 to 1."""
        sent = sum(self.sockets) + sum(self.memory)
        return sum(self.memory) / sent if sent else 0.0


class Team:
    """The live ranks of one system."""

    def __init__(self, name: str, plan: Plan, *, peer: bool, folder: Path, start: Start = here) -> None:
        self.result = Result(name=name)
        self.warm: Turn | None = None
        """The steps before the first turn."""
        self._plan = plan
        self._begin = start
        self._logs = [folder / f"{name}-{rank}.log" for rank in range(plan.ranks)]
        python = str(PEERS) if peer else sys.executable
        self._environment = peer_environment() if peer else {}
        self._ranks = [self._start(python, rank, folder / f"{name}-store") for rank in range(plan.ranks)]
        self._sent: list[list[dict[str, int]]] = []

    def _start(self, python: str, rank: int, store: Path) -> subprocess.Popen[str]:
        plan = self._plan
        job = {"system": self.result.name, "workload": plan.workload, "rank": rank, "ranks": plan.ranks,
               "store": str(store), "microbatch": plan.microbatch, "length": plan.length, "pieces": plan.pieces}
        environment = {**self._environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RANK": str(rank),
                       "LOCAL_RANK": str(rank), "WORLD_SIZE": str(plan.ranks), "LOCAL_WORLD_SIZE": str(plan.ranks)}
        with self._logs[rank].open("w") as log:
            return self._begin(rank, [python, WORKER, json.dumps(job)], env=environment, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)

    def built(self) -> None:
        """Wait until every rank has built its model."""
        self.result.parameters = self._answers()[0]["parameters"]

    def ready(self) -> None:
        """Wait until every rank has built its model, then run the steps that are not counted."""
        self.built()
        self.warm = self.steps(self._plan.warm)

    def steps(self, count: int) -> Turn:
        """Run so many steps, and say what they took."""
        self._order({"steps": count})
        answers = self._answers()
        return Turn(seconds=[max(steps) for steps in zip(*(answer["seconds"] for answer in answers), strict=True)],
                    cpu=statistics.mean(answer["cpu"] for answer in answers),
                    faults=statistics.mean(answer["faults"] for answer in answers),
                    loss=statistics.mean(answer["loss"] for answer in answers), sent=[answer["sent"] for answer in answers],
                    packing=[max(steps) for steps in zip(*(answer["packing"] for answer in answers), strict=True)])

    def count(self) -> list[Count]:
        """Ask every rank what it has sent so far."""
        self._order({"count": True})
        return [Count(**answer) for answer in self._answers()]

    def turn(self) -> None:
        """Run one round's steps."""
        turn, result = self.steps(self._plan.steps), self.result
        result.rounds.append(turn.seconds)
        result.cpu.append(turn.cpu)
        result.faults.append(turn.faults)
        result.losses.append(turn.loss)
        self._sent.append(turn.sent)

    def finish(self) -> None:
        """Collect bytes and memory, and let the ranks end."""
        self._order({"finish": True})
        answers = self._answers()
        steps = self._plan.steps * len(self._sent)
        for way, found in (("sockets", self.result.sockets), ("memory", self.result.memory)):
            found += [(answer["sent"][way] - first[way]) / steps
                      for answer, first in zip(answers, self._sent[0], strict=True)]
        self.result.peak = max(answer["peak"] for answer in answers)
        self.result.resting = max(answer["resident"] for answer in answers)

    def stop(self) -> None:
        """End the ranks, whatever they are doing."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            for pipe in filter(None, (rank.stdin, rank.stdout)):
                with suppress(BrokenPipeError):  # an order that it did not live to read
                    pipe.close()

    def _order(self, order: dict[str, Any]) -> None:
        for rank in self._ranks:
            assert rank.stdin
            try:
                rank.stdin.write(json.dumps(order) + "\n")
                rank.stdin.flush()
            except BrokenPipeError:
                continue  # the answer that does not come tells why

    def _answers(self) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for number, rank in enumerate(self._ranks):
            assert rank.stdout
            line = rank.stdout.readline()
            if not line:
                raise TeamFailed(self._last_words(number))
            answers.append(json.loads(line))
        return answers

    def _last_words(self, number: int) -> str:
        lines = [line for line in self._logs[number].read_text(errors="replace").splitlines() if line.strip()]
        return f"rank {number}: {lines[-1] if lines else 'died without an error'}"


def measure(names: Sequence[str], plan: Plan, *, peers: Iterable[str], tell: Callable[[str], None]) -> list[Result]:
    """Run the named systems in turns and return their results in the order of the names.

    A system that fails keeps the reason in `failure` and the others go on. `tell` receives progress as text.
    """
    everyone = set(peers)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        teams: list[Team] = []
        failed: dict[str, Result] = {}
        try:
            for name in names:
                if name in everyone and not PEERS.exists():
                    failed[name] = Result(name=name, failure="skipped: no .venv-peers (make peers)")
                    continue
                tell(f"{name}: starting")
                teams.append(Team(name, plan, peer=name in everyone, folder=Path(folder)))
                _attempt(teams, teams[-1], failed, teams[-1].ready)
            for number in range(plan.rounds):
                shift = number % max(1, len(teams))
                for team in [*teams[shift:], *teams[:shift]]:
                    tell(f"round {number + 1} of {plan.rounds}: {team.result.name}")
                    _attempt(teams, team, failed, team.turn)
            for team in list(teams):
                _attempt(teams, team, failed, team.finish)
            results = {team.result.name: team.result for team in teams} | failed
        finally:
            for team in teams:
                team.stop()
    return [results[name] for name in names]


def _attempt(teams: list[Team], team: Team, failed: dict[str, Result], action: Callable[[], None]) -> None:
    try:
        action()
    except TeamFailed as error:
        team.stop()
        teams.remove(team)
        failed[team.result.name] = Result(name=team.result.name, failure=str(error))
