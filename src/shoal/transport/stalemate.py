"""Deadlock detection: a rank in a long wait publishes what it waits for, and which collectives it has begun.

The n-th collective of a kind ends when every rank of its group has begun n of that kind. A blocked rank therefore waits for
each rank of the group that has begun fewer. These waits are edges of a graph over the ranks: a cycle in it is a deadlock.

Ranks read each other's records late. A cycle through this rank is a deadlock all the same: this rank begins no collective
while it waits, so the rank that waits for it stays blocked, as does the rank that waits for that one, around the cycle.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Awaited", "WaitRecord", "explain", "stalemate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """The collective that a wait of this rank is to end: the `number`-th of its `tag` in a group."""

    group: str
    """The name of the group, equal on all its ranks and no other group's."""
    members: tuple[int, ...]
    """The ranks of the group, by their numbers in the job."""
    tag: int
    number: int
    what: object
    """Its name, as a string where it is needed."""
    begun: Counter[int]
    """How many collectives of each tag this rank has begun in the group: the live counter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRecord:
    """The wait of a blocked rank, as it publishes it."""

    tag: int
    number: int
    what: str
    call: str
    """The engine's call that it is in, or was in last."""
    begun: Mapping[int, int]
    time: float
    """When it was written, in seconds since 1970 by that rank's clock."""

    def lacked_by(self, other: WaitRecord) -> bool:
        """Whether the wait cannot end, for the rank of `other` has not begun the collective."""
        return other.begun.get(self.tag, 0) < self.number

    def dumps(self) -> str:
        return json.dumps([self.tag, self.number, self.what, self.call, list(self.begun.items()), self.time])

    @classmethod
    def loads(cls, text: str) -> WaitRecord:
        tag, number, what, call, begun, time = json.loads(text)
        return cls(tag=tag, number=number, what=what, call=call, begun=dict(begun), time=time)


def stalemate(rank: int, records: Mapping[int, WaitRecord]) -> list[int]:
    """Return ranks that wait for each other in turn, `rank` first; an empty list where no such circle is known.

    The record of `rank` itself must be of this moment.
    """
    paths, seen = [[rank]], {rank}
    while paths:
        path = paths.pop(0)
        waiting = records[path[-1]]
        if len(path) > 1 and waiting.lacked_by(records[rank]):
            return path
        for other, record in sorted(records.items()):
            if other not in seen and waiting.lacked_by(record):
                seen.add(other)
                paths.append([*path, other])
    return []


def explain(circle: list[int], records: Mapping[int, WaitRecord]) -> str:
    """Return the error for ranks that wait for each other: which, where, and how to fix it."""
    waits = ", ".join(f"rank {rank} for {records[rank].what} ({records[rank].call})" for rank in sorted(circle))
    if all(records[rank].call.startswith("step ") and "reduce of unit" in records[rank].what for rank in circle):
        fix = ("They reduce gradients of different parameters. Let every rank call the same modules; where a script sets "
               "p.grad, set it for the same parameters on every rank, to zeros where a rank has none")
    elif len({records[rank].call.removeprefix("forward").removeprefix("backward") for rank in circle}) == 1:
        fix = ("They take different ways through the model. Let every rank call the same modules; where only some ranks "
               "call a module (an expert, the encoder of a modality), gather the module around it as one: "
               "shoal.zero.set_leaf_modules(model, [module]) before initialize")
    else:
        fix = ("Every rank makes the same calls of the engine, in one order. Where the data of some ranks ends before that "
               "of others, put the loop within `with engine.join():`")
    return f"ranks wait for each other: {waits}. {fix}"
