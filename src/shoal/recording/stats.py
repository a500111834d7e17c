"""Statistics of recorded calls: bandwidths by collective and size, and the ranks that others waited for.

    algorithm bandwidth   S / t         bytes of the whole buffer by the time of a call
    bus bandwidth         f S / t       bytes on each rank's link by time, comparable with the hardware's bandwidth

    f = 2 (n-1)/n for an all-reduce, (n-1)/n for all-gather, reduce-scatter and all-to-all, 1 for the rest, on n ranks

Source of the formulas: NVIDIA's nccl-tests, "Performance reported by NCCL tests". The times are those of `Call`; if results
lay unused, both bandwidths are lower bounds.

A rank is late for a call if it launches it last. The cost is the time that other ranks spent in `wait` before that launch;
a rank that computes meanwhile loses nothing. Moments of different ranks are compared after correcting their clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.recording.call import Key, Stamps

__all__ = ["CallStats", "Lateness", "Name", "RecentCalls", "Wait", "bus_factor", "lateness", "offsets"]

_BUS_FACTORS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "gather": 1, "all_reduce": 2}

Name = tuple[Key, str]
"""Identifies a sequence of calls that all its ranks make: the key, and the name of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStats:
    """All calls of one collective with buffers of one size."""

    key: Key
    calls: int = 0
    sent: int = 0
    """Bytes that this rank sent."""
    timed: int = 0
    """Calls with a recorded end. Calls under way, or that no caller waits for, have no time."""
    seconds: float = 0.0
    """From launch to end, over the timed calls."""
    exposed: float = 0.0
    """The part of `seconds` that callers spent waiting."""

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
        """Bytes per second on a rank's link."""
        return self.algorithm_bandwidth * bus_factor(self.key.op, len(self.key.ranks))


def bus_factor(op: str, ranks: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth of an operation."""
    return _BUS_FACTORS[op] * (ranks - 1) / ranks if op in _BUS_FACTORS and ranks else 1.0


@dataclass(frozen=True, slots=True)
class Wait:
    """The cost of late ranks for one rank, over the compared calls of one key."""

    calls: int = 0
    transfer: float = 0.0
    """Seconds of the shortest call among the ranks, summed over the calls."""
    waited: float = 0.0
    """Seconds that this rank waited for ranks that had not launched yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How often a rank launched last, and how long the others waited for it."""

    rank: int
    calls: int = 0
    """Calls that were compared with the other ranks' calls."""
    last: int = 0
    """Calls that this rank launched last."""
    delay_caused: float = 0.0
    """Seconds that other ranks waited before this rank launched."""
    waited: float = 0.0
    """Seconds that this rank waited before others launched."""


RecentCalls = Mapping[Name, Sequence[tuple[int, Stamps]]]
"""The latest calls of a rank: their numbers and moments, by name."""


def lateness(recent: Sequence[RecentCalls]) -> tuple[list[Lateness], dict[tuple[Key, int], Wait]]:
    """Return the lateness of each rank, and the cost by (key, rank), from the `recent` calls of all ranks, by rank.

    Only calls that every rank of a group has kept are compared.
    """
    ranks = {rank: Lateness(rank=rank) for rank in range(len(recent))}
    waits: dict[tuple[Key, int], Wait] = {}
    for name in {name for each in recent for name in each}:
        key, _ = name
        if len(key.ranks) < 2:
            continue
        kept = [dict(recent[rank].get(name, ())) for rank in key.ranks]
        for number in set(kept[0]).intersection(*kept[1:]):
            calls = {rank: each[number] for rank, each in zip(key.ranks, kept, strict=True)}
            _compare(key, calls, ranks, waits)
    return list(ranks.values()), waits


def _compare(key: Key, calls: Mapping[int, Stamps], ranks: dict[int, Lateness],
             waits: dict[tuple[Key, int], Wait]) -> None:
    last = max(calls, key=lambda rank: calls[rank].began)
    launched = calls[last].began
    transfer = min(call.ended - call.began for call in calls.values())
    for rank, call in calls.items():
        waited = max(0.0, min(launched, call.ended) - call.waiting)
        mine, wait = ranks[rank], waits.get((key, rank), Wait())
        ranks[rank] = replace(mine, calls=mine.calls + 1, last=mine.last + (rank == last), waited=mine.waited + waited)
        ranks[last] = replace(ranks[last], delay_caused=ranks[last].delay_caused + waited)
        waits[key, rank] = Wait(wait.calls + 1, wait.transfer + transfer, wait.waited + waited)


def offsets(rounds: Iterable[Sequence[tuple[float, float]]]) -> list[float]:
    """Return the seconds by which each rank's clock is ahead of rank 0's.

    A round is an all-gather: by rank, its start and end on the rank's own clock. No rank ends before another has started,
    which bounds the offset from both sides. If 0 is within the bounds the clocks count as equal (the ranks of one machine
    share one clock); else the offset is the middle of the bounds, with an error of at most half the shortest all-gather.
    """
    times = list(rounds)
    ahead: list[float] = []
    for rank in range(len(times[0])):
        most = min(each[rank][1] - each[0][0] for each in times)
        least = max(each[rank][0] - each[0][1] for each in times)
        ahead.append(0.0 if least <= 0 <= most else (least + most) / 2)
    return ahead
