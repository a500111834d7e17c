"""A vault keeps two generations of the training state in memory that the nodes' agents own, and that outlives the ranks.

A generation is a checkpoint, in a folder of a memory file system: pieces with checksums, visible once all ranks have written
theirs, so that any number of ranks can load it. A rank writes into a file that the generation links to, and that a later one
reuses once this one is removed. Each node has the files of its own ranks and copies of those of the node
before it (`checkpoint/nodes.py`): the vault survives the loss of one node. It is lost with the only agent, or with two
neighbouring nodes. A damaged generation is removed when the damage is found, and never read again.

Each engine of a script has a vault of its own. A fault may come between their copies of one step, so each loads the newest
generation whose step all vaults have, and begins no generation before the last ones of the others have ended.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.checkpoint import LinkedStaging, Nodes, Ranks, SpreadSnapshot, Writer, tags
from shoal.checkpoint.folder import files_here, incomplete, load_index, locate
from shoal.checkpoint.index import INDEX, parse
from shoal.config.sizes import format_bytes
from shoal.errors import CheckpointError, VaultTooLarge
from shoal.log import logger
from shoal.tier.memory_left import memory_left
from shoal.transport.collectives import Communicator

__all__ = ["GENERATIONS", "Generation", "Vault", "VaultBytes"]

GENERATIONS = 2
"""Complete generations that are kept; a third exists while it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VaultBytes:
    """The memory of one generation, on one node."""

    own: int
    """Bytes of the node's ranks."""
    kept: int
    """Bytes of the ranks of another node, of which this one keeps copies."""

    @property
    def needed(self) -> int:
        """Bytes of all generations, and of the next one."""
        return (self.own + self.kept) * (GENERATIONS + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generation of which a node has the index."""

    name: str
    step: int
    checksum: int
    """Of the index: copies of one step that attempts on other nodes made are other generations."""
    holders: Mapping[str, tuple[int, ...]]
    """The ranks whose node has each file."""
    indexed: tuple[int, ...]
    """The ranks whose node has the index."""

    @property
    def missing(self) -> list[str]:
        """The files that no node has."""
        return [file for file, ranks in self.holders.items() if not ranks]


class Vault:
    """The generations of one engine."""

    def __init__(self, folder: Path, every: int, ranks: Communicator, others: Iterable[Vault] = ()) -> None:
        """Keep generations in `folder`, one each `every` steps. `ranks` are all ranks of the job. A collective call.

        `others` are the vaults of this process, as they come and go; their folders lie beside this one.
        """
        self.folder = folder
        self.every = every
        self._others = others
        self._ranks = ranks
        self._nodes = Nodes.named(ranks.gather_objects(f"{socket.gethostname()}:{folder}"))
        self._writer: Writer | None = None
        self._logged = ""
        """The memory that was logged last."""
        self._size: VaultBytes | None = None
        """The memory that this node is to have room for; None before `reserve` and after `release`."""

    def reserve(self, own: int, coming: int) -> None:
        """Check that every node has room for the generations, and log what they cost, unless that was logged before.

        `own` are the bytes of this rank's part of one, `coming` those of its state in host memory that its first step
        allocates. The other vaults of this process keep their room. A collective call.
        Raises `VaultTooLarge` on every rank where a node has less, unless there are generations: then an earlier attempt
        had more nodes or more memory, and this one makes no further generations, which it warns of.
        """
        by_rank = self._ranks.gather_objects(own)
        self._size = self._measure(by_rank)
        self._log(self._size)
        try:
            self._check_room(coming)
        except VaultTooLarge as error:
            self.release()
            if not any(self._ranks.gather_objects(bool(tags(self.folder)))):
                raise
            if self._ranks.rank == 0:
                logger.warning("%s. This attempt goes on with the copies that an earlier one made, and makes no more: a "
                               "fault costs all steps since them, or since the last checkpoint", error)

    def release(self) -> None:
        """Keep no room for generations any longer: the engine takes no more steps."""
        self._size = None

    def begin(self, step: int) -> bool:
        """Note that the engine takes steps, of which this process's first was `step`.

        Returns whether this rank removed generations of as many steps or more, which a process that has loaded none leaves.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.forget_after(step - 1)

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be copied: not where there is no room."""
        return self._size is not None and step % self.every == 0

    def writer(self) -> Writer:
        """Return the writer of generations. A collective call."""
        if self._writer is None:
            if self._nodes.is_first(self._ranks.rank):
                shutil.rmtree(self._staged, ignore_errors=True)  # of ranks that have ended
            self._ranks.gather_objects(None)  # no rank makes a file before those are gone
            rank = self._ranks.rank
            self._writer = Writer(Ranks.join(self._ranks.group), self._nodes, LinkedStaging(self._staged / str(rank), rank),
                                  log_level=logging.DEBUG, optional=True)  # one each `every` steps
        return self._writer

    def wait_until_ended(self) -> None:
        """Wait until the writing of a generation that is under way has ended, successfully or not."""
        if self._writer is not None:
            self._writer.wait_until_ended()

    def wait_for_others(self) -> None:
        """Wait until no other vault of this process writes: only then may this one replace a generation of its own."""
        for vault in tuple(self._others):
            if vault is not self:
                vault.wait_until_ended()

    def generations(self, after: int) -> list[Generation]:
        """Return the generations of more than `after` steps that the nodes have together, in the order to load them.

        The newest comes first, but those whose step is in all vaults come before others. There are none while another engine
        has taken steps and has no generation yet. Those that cannot be loaded are warned of. A collective call.
        """
        steps = self._steps_of_others()
        if not all(steps):
            return []
        self._remove_incomplete()
        found = self._generations(self.folder, after)
        own = [each for each in found if not each.missing]
        for each in found[:found.index(own[0]) if own else None]:
            if self._ranks.rank == 0:
                logger.warning("the copy of step %d in memory is not loaded: no node has %s", each.step,
                               ", ".join(each.missing))
        return sorted(own, key=lambda each: all(each.step in of_one for of_one in steps), reverse=True)

    def stand_ins(self, step: int, after: int) -> list[Generation]:
        """Return the generations that can stand in for a damaged checkpoint of `step` steps, in the order to load them.

        They are of more than `after` steps. Where the script has other engines, whose checkpoints may be intact, only one of
        `step` steps keeps this engine in step with them. A collective call.
        """
        found = self.generations(after)
        return [each for each in found if each.step == step] if self._steps_of_others() else found

    def disagreement(self, step: int) -> str:
        """Return the steps of the generations in another vault that has none of `step`; empty if there is no such vault.

        A collective call.
        """
        return next((", ".join(map(str, sorted(steps))) for steps in self._steps_of_others() if step not in steps), "")

    def _steps_of_others(self) -> list[set[int]]:
        """Return the steps of the generations of each other engine that has taken steps, in this attempt or before."""
        beside = self._ranks.gather_objects({path.name for path in self.folder.parent.glob("vault*") if path.is_dir()})
        return [{each.step for each in self._generations(self.folder.with_name(name), -1) if not each.missing}
                for name in sorted(set[str]().union(*beside)) if name != self.folder.name]

    def _generations(self, folder: Path, after: int) -> list[Generation]:
        """Return the generations in `folder` of more than `after` steps, newest first. A collective call."""
        holders: dict[tuple[int, str, int], dict[str, list[int]]] = {}
        indexed: dict[tuple[int, str, int], list[int]] = {}
        for rank, found in enumerate(self._ranks.gather_objects(_found(folder, after))):
            for key, files in found.items():
                indexed.setdefault(key, []).append(rank)
                for name, is_here in files.items():
                    holders.setdefault(key, {}).setdefault(name, []).extend([rank] if is_here else [])
        return [Generation(name=name, step=step, checksum=checksum, indexed=tuple(indexed[step, name, checksum]),
                           holders={file: tuple(ranks) for file, ranks in holders[step, name, checksum].items()})
                for step, name, checksum in sorted(holders, reverse=True)]

    def _remove_incomplete(self) -> None:
        """Remove folders whose index is damaged, or whose files have other sizes, and warn of each. A collective call."""
        removed: list[str] = []
        if self._nodes.is_first(self._ranks.rank) and self.folder.is_dir():
            for path, fault in incomplete(self.folder).items():
                removed.append(f"{socket.gethostname()}: {fault}")
                shutil.rmtree(path, ignore_errors=True)
        for fault in sorted(set[str]().union(*self._ranks.gather_objects(removed))):
            if self._ranks.rank == 0:
                logger.warning("a copy in memory is damaged, and is removed: %s", fault)

    def open(self, generation: Generation, ranks: Ranks) -> SpreadSnapshot:
        """Open a generation with all `ranks` of the job. A collective call; raises `CheckpointError` on every rank."""
        path, source = self._path(generation), generation.indexed[0]
        with ranks.lock:
            failure = f"could not load {path}"
            text = ranks.run_collectively(failure, lambda: (path / INDEX).read_bytes() if ranks.rank == source else b"")
            text = ranks.all_gather(text)[source]
            index = ranks.run_collectively(failure, lambda: parse(text, path / INDEX))
        return SpreadSnapshot.open(path, index, ranks, generation.holders)

    def remove(self, damaged: Generation, error: CheckpointError) -> None:
        """Remove a generation that cannot be read. A collective call, which keeps it where a rank was lost meanwhile."""
        self._ranks.gather_objects(None)  # a lost connection is no damage: it raises here
        if self._ranks.rank == 0:
            logger.warning("the copy of step %d in memory cannot be used, and is removed: %s", damaged.step, error)
        if self._nodes.is_first(self._ranks.rank):
            shutil.rmtree(self._path(damaged), ignore_errors=True)
        self._ranks.gather_objects(None)  # no rank looks for generations before it is gone

    def forget_after(self, step: int) -> bool:
        """Remove generations of more than `step` steps, with which training does not go on; return whether this rank did.

        Their files need not be complete.
        """
        if not self._nodes.is_first(self._ranks.rank) or not self.folder.is_dir():
            return False
        later = [tag for tag in tags(self.folder) if tag.step > step]
        for tag in later:
            shutil.rmtree(tag.path, ignore_errors=True)
        return bool(later)

    @property
    def _staged(self) -> Path:
        """The folder of the files that this node's ranks write, and that generations link to."""
        return self.folder.with_name(f"staged-{self.folder.name}")

    def _path(self, generation: Generation) -> Path:
        """Return the folder of a generation on this node, which may be missing."""
        return locate(self.folder, generation.name) or self.folder / generation.name

    def _measure(self, by_rank: list[int]) -> VaultBytes:
        """Return this node's bytes of a generation, of which each rank has those of `by_rank`."""
        nodes, node = self._nodes, self._nodes.of[self._ranks.rank]
        return VaultBytes(
            own=sum(by_rank[rank] for rank in nodes.ranks(node)),
            kept=sum(size for rank, size in enumerate(by_rank) if node in nodes.holders(rank) - {nodes.of[rank]}))

    def _log(self, size: VaultBytes) -> None:
        """Log the memory and the traffic of this vault, unless the same was logged before. A collective call."""
        needed = max(self._ranks.gather_objects(size.needed))
        shown = f"{format_bytes(needed)} on a node ({GENERATIONS} generations, and the next)"
        if shown == self._logged:
            return
        self._logged = shown
        if self._ranks.rank == 0 and self._nodes.count == 1:
            logger.info("resilience.vault: %s of memory, a copy every %d steps, nothing sent to other nodes. All ranks are "
                        "on one node: to survive its loss, save checkpoints elsewhere", shown, self.every)
        elif self._ranks.rank == 0:
            logger.info("resilience.vault: %s of memory, a copy every %d steps; each of the %d nodes sends its %s of a "
                        "copy to the next, so that one node can be lost", shown, self.every, self._nodes.count,
                        format_bytes(size.own))

    def _check_room(self, coming: int) -> None:
        """Raise `VaultTooLarge` on every rank if a node has no room for all vaults. A collective call."""
        self.wait_for_others()  # a file that is made between two looks would count as memory that others use
        self.wait_until_ended()
        vaults, nodes = [vault for vault in {self, *self._others} if vault._size is not None], self._nodes
        sizes = [vault._size.needed for vault in vaults if vault._size is not None]
        held = _bytes_of_files(folder for vault in vaults for folder in (vault.folder, vault._staged))  # replaced one by one
        by_rank = self._ranks.gather_objects(coming)
        on_node = sum(by_rank[rank] for rank in nodes.ranks(nodes.of[self._ranks.rank]))
        memory, left = self.folder.parent.parent, memory_left()  # of the container too, which counts /dev/shm
        room = _Room(needed=sum(sizes), engines=len(sizes), free=shutil.disk_usage(self.folder.parent).free + held,
                     where=f"{socket.gethostname()}:{memory}", of_machine=False)
        if left is not None and left - on_node + held < room.free:
            room = replace(room, free=max(0, left - on_node) + held, where=socket.gethostname(), of_machine=True)
        worst = max(self._ranks.gather_objects(room), key=lambda each: each.needed - each.free)
        if worst.needed > worst.free:
            raise VaultTooLarge(worst.describe(memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """The memory of a node for the vaults of all engines."""

    engines: int
    needed: int
    free: int
    where: str
    """The host, and the file system that limits it."""
    of_machine: bool
    """Whether the memory of the host, or of the container, is the limit, and not the file system."""

    def describe(self, memory: Path) -> str:
        """Return the error of a node that has too little; `memory` is the file system of the vaults."""
        remedy = ("give the machine or the container more memory" if self.of_machine else
                  f"enlarge {memory} (mount -o remount,size=SIZE {memory}; docker run --shm-size SIZE)")
        size = f"{format_bytes(self.needed)} of memory"
        of_each = f"{GENERATIONS} generations, and the next" + (f", of {self.engines} engines" if self.engines > 1 else "")
        return (f"resilience.vault: {self.where} has {format_bytes(self.free)} free, and copies need {size} on this node "
                f"({of_each}). Another `every` needs as much, and fewer generations cannot be "
                f"chosen: {remedy}, put less state on a node (more nodes, a smaller model), or remove resilience.vault and "
                f"save checkpoints")


def _bytes_of_files(folders: Iterable[Path]) -> int:
    """Return the bytes of the files in folders; a file with several names counts once. Files may go meanwhile."""
    sizes: dict[int, int] = {}
    for path, _, names in (each for folder in folders for each in os.walk(folder)):
        for name in names:
            with suppress(FileNotFoundError):
                facts = os.stat(os.path.join(path, name))
                sizes[facts.st_ino] = facts.st_size
    return sum(sizes.values())


def _found(folder: Path, after: int) -> dict[tuple[int, str, int], dict[str, bool]]:
    """Return the generations in a folder of this node: step, name and checksum -> each file, and whether it is here."""
    found: dict[tuple[int, str, int], dict[str, bool]] = {}
    for tag in tags(folder) if folder.is_dir() else []:
        if tag.step > after:
            index = load_index(tag.path)
            here = {file.name for file in files_here(tag.path, index)}
            checksum = zlib.crc32((tag.path / INDEX).read_bytes())
            found[tag.step, tag.name, checksum] = {file.name: file.name in here for file in index.files}
    return found
