"""A vault keeps two generations of the training state in memory that the node's agent owns, and that outlives the ranks.

A generation is a checkpoint, in a folder of a memory file system: pieces with checksums, visible once all ranks have written
theirs, so that any number of ranks can load it. A damaged generation is removed when the damage is found, and never read
again. With the agent, or the node, all of it is gone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint import Ranks, Tag, Writer, tags
from shoal.checkpoint.piece import Piece
from shoal.errors import CheckpointError
from shoal.log import logger
from shoal.transport.collectives import Communicator

__all__ = ["GENERATIONS", "Vault", "VaultBytes"]

GENERATIONS = 2
"""Complete generations that are kept; a third exists while it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VaultBytes:
    """The memory of one generation."""

    own: int
    """Bytes of this rank."""
    all: int
    """Bytes of all ranks."""

    @property
    def needed(self) -> int:
        """Bytes of all generations, and of the copies that ranks write the next one from."""
        return self.all * (GENERATIONS + 2)


class Vault:
    """The generations of one engine."""

    def __init__(self, folder: Path, every: int, ranks: Communicator) -> None:
        """Keep generations in `folder`, one each `every` steps. `ranks` are all ranks of the job, on one node."""
        self.folder = folder
        self._every = every
        self._ranks = ranks
        self._writer: Writer | None = None

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be copied."""
        return step % self._every == 0

    def writer(self, pieces: Sequence[Piece]) -> Writer:
        """Return the writer of generations. A collective call; at the first one it checks that memory has room for `pieces`.

        Raises `CheckpointError` on every rank where it has not.
        """
        if self._writer is None:
            self._check_room(self._measure(pieces))
            self._writer = Writer(Ranks.join(self._ranks.group))
        return self._writer

    def wait_until_ended(self) -> None:
        """Wait until the writing of a generation that is under way has ended, successfully or not."""
        if self._writer is not None:
            self._writer.wait_until_ended()

    def generations(self, after: int) -> list[Tag]:
        """Return the complete generations of more than `after` steps, newest first. A collective call."""
        found = [tag for tag in reversed(tags(self.folder)) if tag.step > after] if self.folder.is_dir() else []
        return self._ranks.gather_objects(found)[0]

    def remove(self, damaged: Tag, error: CheckpointError) -> None:
        """Remove a generation that cannot be read. A collective call."""
        if self._ranks.rank == 0:
            logger.warning("the copy of step %d in memory cannot be used, and is removed: %s", damaged.step, error)
            shutil.rmtree(damaged.path, ignore_errors=True)
        self._ranks.gather_objects(None)  # no rank looks for generations before it is gone

    def _measure(self, pieces: Sequence[Piece]) -> VaultBytes:
        own = sum((piece.stop - piece.start) * piece.data.dtype.itemsize for piece in pieces)
        return VaultBytes(own=own, all=sum(self._ranks.gather_objects(own)))

    def _check_room(self, size: VaultBytes) -> None:
        """Log the memory of the vault; raise `CheckpointError` on every rank if it is not there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        free = min(self._ranks.gather_objects(min(shutil.disk_usage(self.folder).free, _available())))
        shown = f"{size.needed / 1e6:,.1f} MB ({GENERATIONS + 2} copies of {size.all / 1e6:,.1f} MB)"
        if size.needed > free:
            raise CheckpointError(f"resilience.vault: needs {shown}, and {free / 1e6:,.1f} MB of memory are free in "
                                  f"{self.folder}; train on more nodes, enlarge /dev/shm, or remove resilience.vault and "
                                  f"save checkpoints")
        if self._ranks.rank == 0:
            logger.info("resilience.vault: %s of memory, a copy every %d steps, nothing sent to other nodes. All ranks are "
                        "on one node: to survive its loss, save checkpoints elsewhere", shown, self._every)


def _available() -> int:
    """Return the bytes of memory that the system can give."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
