"""What a record amounts to: bandwidths of each collective and size, and which rank kept which waiting.

    algorithm bandwidth   S / t         bytes of the whole buffer by the time of a call
    bus bandwidth         f S / t       what each rank's link carried, comparable with what its hardware can

    f = 2 (n-1)/n for an all-reduce, (n-1)/n for all-gather, reduce-scatter and all-to-all, 1 for the rest, on n ranks

Source of the formulas: NVIDIA's nccl-tests, "Performance reported by NCCL tests". The times are those of `Call`, so where a
result lay unused both are lower bounds.

A rank is late for a call when it launches it last. What that costs is the time for which others stood in `wait` before
that launch; a rank that computes meanwhile loses nothing. Their moments are compared by clocks set to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.recording.call import Key, Stamps

__all__ = ["CallStats", "Lateness", "Name", "Said", "Wait", "lateness", "offsets"]

_SHARES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "gather": 1, "all_reduce": 2}

Name = tuple[Key, str]
"""Of a sequence of calls that ranks make alike: of what, and for whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStats:
    """All calls of one collective with buffers of one size."""

    key: Key
    calls: int = 0
    sent: int = 0
    """Bytes that this rank sent."""
    timed: int = 0
    """Calls whose end was seen: those that still travel, or whose end nobody waits for, have no time."""
    seconds: float = 0.0
    """From launch to end, over the timed calls."""
    exposed: float = 0.0
    """The part of it that somebody stood waiting."""

    @property
    def latency(self) -> float:
        """Mean seconds of a call."""
        return self.seconds / self.timed if self.timed else 0.0

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second of the buffer."""
        return self.key.size * self.timed / self.seconds if self.seconds else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that a rank's link carried."""
        return self.algorithm_bandwidth * bus_factor(self.key.op, len(self.key.ranks))


def bus_factor(op: str, ranks: int) -> float:
    """Return what the algorithm bandwidth of an operation is multiplied by."""
    return _SHARES[op] * (ranks - 1) / ranks if op in _SHARES and ranks else 1.0


@dataclass(frozen=True, slots=True)
class Wait:
    """What lateness cost one rank in the calls of one row that were compared."""

    calls: int = 0
    transfer: float = 0.0
    """Seconds of the rank whose call was shortest, over the calls."""
    stood: float = 0.0
    """Seconds that this rank stood waiting for ranks that had not launched yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How often a rank was the last, and what it cost the others."""

    rank: int
    calls: int = 0
    """Calls of it that were compared with the others'."""
    last: int = 0
    held: float = 0.0
    """Seconds that others stood waiting before this rank launched."""
    stood: float = 0.0
    """Seconds that this rank stood waiting before others launched."""


Said = Mapping[Name, Sequence[tuple[int, Stamps]]]
"""The latest calls of a rank: their numbers and moments, by name."""


def lateness(said: Sequence[Said]) -> tuple[list[Lateness], dict[tuple[Key, int], Wait]]:
    """Return what each rank of the job cost the others, and what each (row, rank) lost, of what all `said` by rank.

    Only calls that every rank of a group still remembers are compared.
    """
    ranks = {rank: Lateness(rank=rank) for rank in range(len(said))}
    waits: dict[tuple[Key, int], Wait] = {}
    for name in {name for each in said for name in each}:
        key, _ = name
        if len(key.ranks) < 2:
            continue
        remembered = [dict(said[rank].get(name, ())) for rank in key.ranks]
        for number in set(remembered[0]).intersection(*remembered[1:]):
            calls = {rank: each[number] for rank, each in zip(key.ranks, remembered, strict=True)}
            _compare(key, calls, ranks, waits)
    return list(ranks.values()), waits


def _compare(key: Key, calls: Mapping[int, Stamps], ranks: dict[int, Lateness],
             waits: dict[tuple[Key, int], Wait]) -> None:
    last = max(calls, key=lambda rank: calls[rank].began)
    launched = calls[last].began
    transfer = min(call.ended - call.began for call in calls.values())
    for rank, call in calls.items():
        stood = max(0.0, min(launched, call.ended) - call.waiting)
        mine, wait = ranks[rank], waits.get((key, rank), Wait())
        ranks[rank] = replace(mine, calls=mine.calls + 1, last=mine.last + (rank == last), stood=mine.stood + stood)
        ranks[last] = replace(ranks[last], held=ranks[last].held + stood)
        waits[key, rank] = Wait(wait.calls + 1, wait.transfer + transfer, wait.stood + stood)


def offsets(rounds: Iterable[Sequence[tuple[float, float]]]) -> list[float]:
    """Return by how much each rank's clock is ahead of rank 0's.

    A round is an exchange between all ranks: by rank, when it spoke and when it had heard everyone, by its own clock. What
    was spoken was heard later, both ways: that bounds the offset from both sides. Where 0 is within the bounds the clocks
    are taken for one (ranks of one machine have one); else the middle is taken, at most half the shortest exchange off.
    """
    heard = list(rounds)
    found: list[float] = []
    for rank in range(len(heard[0])):
        most = min(each[rank][1] - each[0][0] for each in heard)
        least = max(each[rank][0] - each[0][1] for each in heard)
        found.append(0.0 if least <= 0 <= most else (least + most) / 2)
    return found
