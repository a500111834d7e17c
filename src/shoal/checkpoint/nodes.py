"""The nodes of the ranks that save a checkpoint, where each node has a folder of its own in memory.

    node 0   the files of its ranks, and copies of those of node 2
    node 1   the files of its ranks, and copies of those of node 0
    node 2   the files of its ranks, and copies of those of node 1

Each file is on two nodes. Losing one node, or several that are not neighbours, loses no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shoal.checkpoint.index import File
from shoal.checkpoint.memory_file import map_file
from shoal.checkpoint.ranks import Ranks

__all__ = ["Nodes", "copy_to_partners"]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The node of each rank, by rank. Ranks that share one folder are one node."""

    of: tuple[int, ...]

    @classmethod
    def shared(cls, ranks: int) -> Nodes:
        """Return the one node of ranks that share a folder."""
        return cls((0,) * ranks)

    @classmethod
    def named(cls, names: Sequence[str]) -> Nodes:
        """Return the nodes of ranks with the `names` of their nodes, numbered by their first ranks."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @property
    def count(self) -> int:
        return len(set(self.of))

    def ranks(self, node: int) -> list[int]:
        """Return the ranks of a node."""
        return [rank for rank, each in enumerate(self.of) if each == node]

    def is_first(self, rank: int) -> bool:
        """Whether `rank` is the first of its node, which creates, publishes and removes folders there."""
        return self.of.index(self.of[rank]) == rank

    def partner(self, rank: int) -> int | None:
        """Return the rank that keeps copies of the files of `rank`, on the next node; None where there is no other node."""
        if self.count == 1:
            return None
        place, others = self.ranks(self.of[rank]).index(rank), self.ranks((self.of[rank] + 1) % self.count)
        return others[place % len(others)]

    def holders(self, rank: int) -> set[int]:
        """Return the nodes that have the files of `rank`: its own, and that of its partner."""
        partner = self.partner(rank)
        return {self.of[rank]} if partner is None else {self.of[rank], self.of[partner]}

    def kept_on(self, node: int, files: Iterable[File]) -> list[File]:
        """Return the files, of all, that are on `node`: those of its ranks, and the copies that its ranks keep."""
        ranks = {rank for rank in range(len(self.of)) if node in self.holders(rank)}
        return [file for file in files if file.rank in ranks]


def copy_to_partners(ranks: Ranks, nodes: Nodes, folder: Path, files: Iterable[File], failure: str) -> None:
    """Copy each of `files` from the `folder` of its rank's node to that of its partner's. A collective call.

    Raises CheckpointError, which begins with `failure`, on every rank if a node has no room.
    """
    mine = [(file, partner) for file in files
            if (partner := nodes.partner(file.rank)) is not None and ranks.rank in (file.rank, partner)]

    def opened() -> list[Tensor]:
        return [map_file(folder / file.name, file.size, new=partner == ranks.rank) for file, partner in mine]

    data = ranks.run_collectively(failure, opened)
    ranks.exchange(
        sent=[(tensor, partner) for tensor, (_, partner) in zip(data, mine, strict=True) if partner != ranks.rank],
        received=[(tensor, file.rank) for tensor, (file, partner) in zip(data, mine, strict=True) if partner == ranks.rank])
