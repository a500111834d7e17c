"""Where each parameter of a unit lies in the unit's flat buffer, and which part of it each rank holds.

Parameters ("slots") lie one after the other, ordered by optimizer group; the buffer is N equal shards, one per rank:

    | slot 0      | slot 1 | slot 2           |pad|
    | shard of rank 0      | shard of rank 1        |

Users and checkpoint files never see the flat buffer: the part of a slot within a shard is a `Part`, elements [start, stop)
of a named tensor in row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod

from torch import Tensor

ALIGNMENT = 16
"""Slots start at multiples of so many elements, so that kernels find them aligned (64 bytes in fp32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter's place in a unit."""

    name: str
    shape: tuple[int, ...]
    start: int
    group: int = 0
    """The optimizer group of the parameter."""

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements [start, stop) of a slot, found at `offset` within the buffer of a shard."""

    slot: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The slots of one unit over `ranks` equal shards."""

    slots: tuple[Slot, ...]
    ranks: int
    size: int
    """Elements of the whole buffer, padding included."""

    @classmethod
    def pack(cls, shapes: Sequence[tuple[str, tuple[int, ...], int]], ranks: int, copies: int = 1,
             grain: int = 1) -> Layout:
        """Lay (name, shape, group) one after the other; the groups must be in order. Each shard is a multiple of `copies`
        and of `grain`.
        """
        slots: list[Slot] = []
        end = 0
        for name, shape, group in shapes:
            assert not slots or slots[-1].group <= group, "slots of one group lie together"
            slots.append(Slot(name=name, shape=tuple(shape), start=_round_up(end, ALIGNMENT), group=group))
            end = slots[-1].stop
        return cls(slots=tuple(slots), ranks=ranks, size=_round_up(end, ranks * copies * lcm(ALIGNMENT, grain)))

    @property
    def elements(self) -> int:
        """Elements of the slots, padding not included."""
        return sum(prod(slot.shape) for slot in self.slots)

    def shard_range(self, rank: int) -> range:
        step = self.size // self.ranks
        return range(rank * step, (rank + 1) * step)

    def parts(self, shard: range) -> Iterator[Part]:
        """Yield the parts of the slots that lie within `shard`, in order."""
        for index, slot in enumerate(self.slots):
            start, stop = max(slot.start, shard.start), min(slot.stop, shard.stop)
            if start < stop:
                yield Part(slot=index, start=start - slot.start, stop=stop - slot.start, offset=start - shard.start)

    def names(self, elements: range) -> list[str]:
        """Return the names of the slots that lie, in part or whole, among `elements`."""
        return [self.slots[part.slot].name for part in self.parts(elements)]

    def gaps(self) -> Iterator[range]:
        """Yield the padding between and behind the slots."""
        end = 0
        for slot in self.slots:
            if end < slot.start:
                yield range(end, slot.start)
            end = slot.stop
        if end < self.size:
            yield range(end, self.size)

    def clear_gaps(self, flat: Tensor) -> None:
        """Fill the gaps of the whole buffer with zeros."""
        for gap in self.gaps():
            flat[gap.start:gap.stop].zero_()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Cut the whole buffer into one tensor per slot, of the slot's shape."""
        return [flat[slot.start:slot.stop].view(slot.shape) for slot in self.slots]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
