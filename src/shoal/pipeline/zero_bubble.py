"""Zero bubble: the halves of backward for the weights go where a rank would wait, or has no room for one more forward.

The gradient of a stage's input is what the rank before waits for; the gradients of its weights nobody waits for (Qi et al.
2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2). So the order of F and I is given, and W fills it, as in
section 3.1 there: in steps of one unit, in which each rank does one thing, a rank does

    the next of its order    if what it needs is there, and for F also the room
    the oldest W it owes     if not
    nothing                  if it owes none

A forward takes room for one microbatch of one stage, and its W gives it back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from shoal.pipeline.instruction import Instruction, Op

__all__ = ["fill"]


def fill(orders: Sequence[Iterable[Instruction]], *, stages: int, room: int) -> tuple[tuple[Instruction, ...], ...]:
    """Return `orders`, of F and I for each rank, with a W for each I; no rank holds more than `room` forwards at once."""
    ranks = [_Rank(order, stages, room) for order in orders]
    there: set[Instruction] = set()
    while any(rank.unfinished for rank in ranks):
        chosen = [rank.choose(there) for rank in ranks]  # all before any is there: they happen in the same unit of time
        assert any(chosen), "the orders of F and I wait for each other, or for room"
        there.update(instruction for instruction in chosen if instruction is not None)
    return tuple(tuple(rank.row) for rank in ranks)


class _Rank:
    """One rank: what it has done, has yet to do, and owes."""

    def __init__(self, order: Iterable[Instruction], stages: int, room: int):
        self.row: list[Instruction] = []
        self._order = deque(order)
        self._owed: deque[Instruction] = deque()
        self._stages = stages
        self._room = room

    @property
    def unfinished(self) -> bool:
        return bool(self._order or self._owed)

    def choose(self, there: set[Instruction]) -> Instruction | None:
        """Do one thing, and return it."""
        if self._order and self._can(self._order[0], there):
            instruction = self._order.popleft()
        elif self._owed:
            instruction = self._owed.popleft()
        else:
            return None
        if instruction.kind is Op.INPUT:
            self._owed.append(Instruction(instruction.stage, Op.WEIGHT, instruction.microbatch))
        self._room += {Op.FORWARD: -1, Op.WEIGHT: 1}.get(instruction.kind, 0)
        self.row.append(instruction)
        return instruction

    def _can(self, instruction: Instruction, there: set[Instruction]) -> bool:
        if instruction.kind is Op.FORWARD and not self._room:
            return False
        return all(needed in there for needed in instruction.needs(self._stages))
