"""A save stages the pieces, then a background thread writes, verifies and publishes them.

    every rank   stages its pieces and returns to training
    rank 0       removes the leftovers of interrupted saves, creates the hidden folder
    every rank   writes its files, syncs them, reads them back
    rank 0       merges the parts into the index
    every rank   adds files of its own, where the caller asks for that (`add_files`)
    rank 0       renames the folder to its tag, updates `latest`
    rank 0       deletes old checkpoints

Where each node has a folder of its own (`nodes.py`), the first rank of each does there what rank 0 does, and each file is
copied to a second node before the index is written.
After each line all ranks learn whether it succeeded on every rank. Nothing visible changes before the rename, so a save that
fails, is killed, or finds the disk full leaves the previous checkpoint and `latest` unchanged.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from shoal.checkpoint import folder as folders
from shoal.checkpoint import unreported
from shoal.checkpoint.index import INDEX, File, Index, RankPart, StoredTensor, merge, parse, parse_part
from shoal.checkpoint.nodes import Nodes, copy_to_partners
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.rank_file import Staged, Staging, disk_full, write_rank_file
from shoal.checkpoint.ranks import Ranks
from shoal.checkpoint.tensor_file import CODES
from shoal.checkpoint.values import encode
from shoal.errors import CheckpointError, RanksDisagree, UsageError
from shoal.log import logger

__all__ = ["FILE_BYTES", "PRIVATE", "SHARED", "PendingSave", "Writer", "wait_for_saves", "write"]

SHARED, PRIVATE = "shared/", "private/"
FILE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """The contents that one rank saves."""

    staged: Staged
    shared: JsonValue
    private: JsonValue
    add_files: Callable[[Path], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveOptions:
    """The options of one save, equal on all ranks."""

    folder: Path
    tag: str
    step: int
    latest: bool
    keep_last: int | None
    read_back: bool
    log_level: int
    """The level at which removed checkpoints are logged."""


class PendingSave:
    """A save that may still be running."""

    def __init__(self, path: Path, *, optional: bool = False) -> None:
        """`optional`: a failure of which no caller learns leaves the exit code of the process as it is."""
        self.path = path
        self.optional = optional
        self._failure: BaseException | None = None
        self._claim = threading.Lock()
        self._ended = threading.Event()
        self._reported = False

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._ended.is_set()

    def wait(self) -> Path:
        """Wait for the save to end and return its folder. Raises CheckpointError, on every rank, if the save failed."""
        self.mark_reported()
        if self._failure is not None:
            raise self._failure
        return self.path

    def wait_until_ended(self) -> None:
        """Wait for the save to end, successfully or not; do not raise its failure."""
        self._ended.wait()

    def raise_failure(self) -> None:
        """Wait for the save to end and raise its failure, unless it has been raised already."""
        self._ended.wait()
        if not self._reported:
            self.wait()

    def mark_reported(self) -> None:
        """Wait for the save to end and mark its failure as reported to the caller."""
        self._ended.wait()
        self._reported = True
        unreported.forget(self)

    def begin(self) -> None:
        """Make the module's `wait_for_saves` wait for this save until `end`."""
        _running.add(self)

    def claim(self) -> bool:
        """Claim the right to run and end this save. Return False if another thread has claimed it."""
        return self._claim.acquire(blocking=False)

    def end(self, failure: BaseException | None) -> None:
        """Store the failure, if any, and release all waiting threads."""
        self._failure = failure
        if failure is not None and not self.optional:
            unreported.note(self, failure)
        self._ended.set()
        _running.discard(self)


_running: set[PendingSave] = set()
"""The saves of this process that have not ended, of all writers."""


def wait_for_saves() -> None:
    """Wait for every save that this process has begun, so that a later read finds its checkpoint.

    Failures are not raised here but by the `PendingSave` of the save.
    """
    for pending in tuple(_running):  # a copy, because saves can begin and end meanwhile
        pending.wait_until_ended()


class Writer:
    """Saves checkpoints one at a time and reuses the staging buffer."""

    def __init__(self, ranks: Ranks | None = None, nodes: Nodes | None = None, staging: Staging | None = None, *,
                 log_level: int = logging.INFO, optional: bool = False) -> None:
        """Write with `ranks` (see `Ranks.join`); None means this process only.

        All ranks write to one folder, unless `nodes` says that each node has a folder of its own. `staging` is where this
        rank's state is copied first; None: a buffer. `log_level` is that of a line for each checkpoint that `keep_last`
        removes. `optional`: the process ends with its own exit code although a save failed and no caller learned of it.
        """
        self.ranks = ranks or Ranks()
        self._nodes = nodes or Nodes.shared(self.ranks.count)
        self._staging = staging or Staging()
        self._log_level = log_level
        self._optional = optional
        self._pending: PendingSave | None = None

    def wait(self) -> None:
        """Wait for the running save, if any. Raises its CheckpointError unless that has been raised already."""
        if self._pending is not None:
            self._pending.raise_failure()

    def wait_until_ended(self) -> None:
        """Wait for the running save, if any, successful or not."""
        if self._pending is not None:
            self._pending.wait_until_ended()

    def write(self, folder: str | os.PathLike[str], tag: str, pieces: Iterable[Piece], *, step: int = 0,
              shared: dict[str, object] | None = None, private: dict[str, object] | None = None, latest: bool = True,
              keep_last: int | None = None, read_back: bool = True, file_bytes: int = FILE_BYTES, streamed: bool = False,
              add_files: Callable[[Path], None] | None = None) -> PendingSave:
        """Begin to save `pieces` as `folder/tag`. A collective call; it first waits for an earlier save.

        The pieces of all ranks must be disjoint and cover every tensor; they may change after the return, or, if `streamed`,
        once the save is complete: what rests in host memory is then not copied. `shared` values
        are saved from rank 0 and `private` values from every rank (types: `values.encode`). `latest` updates the file
        `latest`, `keep_last` is the number of checkpoints to keep, `read_back` compares the bytes on disk with the bytes
        written, and `file_bytes` is the largest size of a file. `add_files` is called on every rank with the folder of the
        complete checkpoint, before it is published; the files that it writes there appear with the checkpoint.

        Raises UsageError for an invalid tag or `keep_last` and for a value that needs pickle; raises CheckpointError for
        invalid pieces and for an unreported failure of the earlier save. The other ranks receive the error from
        `PendingSave.wait`.
        """
        self.wait()
        save = _SaveOptions(folder=Path(folder), tag=tag, step=step, latest=latest, keep_last=keep_last, read_back=read_back,
                            log_level=self._log_level)
        pending = PendingSave(save.folder / tag, optional=self._optional)
        self.ranks.lock.acquire()  # released when the save has ended
        try:
            self._pending = pending
            pending.begin()
            _check_options(save)
            content = self._stage(pieces, shared or {}, private or {}, file_bytes, add_files, streamed=streamed)
            threading.Thread(target=self._run, args=(save, content, pending), name=f"shoal-save-{tag}").start()
        except BaseException as error:
            failure = error if isinstance(error, Exception) else CheckpointError(f"interrupted by {type(error).__name__}")
            self._run(save, failure, pending)  # the other ranks have begun: tell them, unless the thread already runs
            pending.mark_reported()
            raise
        return pending

    def _stage(self, pieces: Iterable[Piece], shared: dict[str, object], private: dict[str, object],
               file_bytes: int, add_files: Callable[[Path], None] | None, *, streamed: bool) -> _Content:
        shared_values, private_values = encode(shared), encode(private)
        named = [(f"{PRIVATE}{self.ranks.rank}/{i}", value) for i, value in enumerate(private_values.tensors)]
        if self.ranks.rank == 0:
            named += [(f"{SHARED}{i}", value) for i, value in enumerate(shared_values.tensors)]
        values = [Piece(name=name, shape=tuple(value.shape), start=0, stop=value.numel(), data=value.reshape(-1))
                  for name, value in named]
        staged = self._staging.copy([*pieces, *values], file_bytes, streamed=streamed)
        return _Content(staged=staged, shared=shared_values.json, private=private_values.json, add_files=add_files)

    def _run(self, save: _SaveOptions, content: _Content | Exception, pending: PendingSave) -> None:
        """Run the whole save. This is the body of a non-daemon thread, so the interpreter waits for it at exit.

        A failure that no caller learns of makes the exit code 1 (`unreported.py`).

        Only the first call runs the save. An interrupt can raise in the main thread although the new thread has started;
        the main thread's call then does nothing.
        """
        if not pending.claim():
            return
        failure: BaseException | None = None
        try:
            _save_collectively(self.ranks, self._nodes, save, content)
        except BaseException as error:  # raised by PendingSave.wait, or by the next save, if one of them comes
            failure = error
            if pending.optional:  # another rank may have made it complete
                logger.warning("the copy in memory %s was interrupted, and counts only if it is complete: %s", pending.path,
                               error)
            else:
                logger.error("the checkpoint %s was not saved: %s", pending.path, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.ranks.lock.release()
            pending.end(failure)


def write(folder: str | os.PathLike[str], tag: str, pieces: Iterable[Piece], *, ranks: Ranks | None = None, step: int = 0,
          shared: dict[str, object] | None = None, private: dict[str, object] | None = None) -> Path:
    """Save one checkpoint and wait for it (see `Writer.write`)."""
    return Writer(ranks).write(folder, tag, pieces, step=step, shared=shared, private=private).wait()


def _check_options(save: _SaveOptions) -> None:
    folders.saving_path(save.folder, save.tag)
    if save.keep_last is not None and save.keep_last < 1:
        raise UsageError(f"keep_last: got {save.keep_last}; give 1 or more, or None to keep all")


def _save_collectively(ranks: Ranks, nodes: Nodes, save: _SaveOptions, content: _Content | Exception) -> None:
    paths = [os.fsdecode(path) for path in ranks.all_gather(os.fsencode(save.folder / save.tag))]
    first = nodes.is_first(ranks.rank)
    if len(set(paths)) > nodes.count:
        other = next(rank for rank, path in enumerate(paths) if path != paths[0])
        raise RanksDisagree(f"ranks save to different folders, rank 0 to {paths[0]}, rank {other} to "
                            f"{paths[other]}; give every rank the same folder and tag")
    failure = f"could not save {paths[0]}"
    with ExitStack() as locks:
        ready = ranks.run_collectively(failure, lambda: _prepare(save, content, locks, first=first))
        hidden = folders.saving_path(save.folder, save.tag)
        try:
            part = ranks.run_collectively(failure, lambda: _write_part(hidden, save, ready, ranks.rank))
            parts = ranks.gather(part.dump())
            if nodes.count == 1:
                ranks.run_collectively(
                    failure, lambda: _write_index(hidden, save, _merged(save, parts), None) if first else None)
            else:
                text = ranks.run_collectively(failure, lambda: _merged(save, parts).dump() if ranks.rank == 0 else b"")
                index = parse(ranks.all_gather(text)[0], hidden)
                copy_to_partners(ranks, nodes, hidden, index.files, failure)
                here = nodes.kept_on(nodes.of[ranks.rank], index.files)
                ranks.run_collectively(failure, lambda: _write_index(hidden, save, index, here) if first else None)
            if (add_files := ready.add_files) is not None:
                ranks.run_collectively(failure, lambda: add_files(hidden))
            ranks.run_collectively(failure, lambda: _publish(hidden, save) if first else None)
            if save.keep_last is not None:  # once it is visible on every node
                ranks.run_collectively(failure, lambda: _retain(save) if first else None)
        except BaseException:
            if first:
                shutil.rmtree(hidden, ignore_errors=True)
            raise


def _prepare(save: _SaveOptions, content: _Content | Exception, locks: ExitStack, *, first: bool) -> _Content:
    if isinstance(content, Exception):
        raise content
    if first:
        save.folder.mkdir(parents=True, exist_ok=True)
        folders.clean(save.folder, save.tag)
        hidden = folders.saving_path(save.folder, save.tag)
        hidden.mkdir()
        locks.enter_context(folders.lock(hidden, shared=False))
    return content


def _write_part(hidden: Path, save: _SaveOptions, content: _Content, rank: int) -> RankPart:
    """Write the files of one rank and describe them."""
    if not hidden.is_dir():
        raise CheckpointError(f"{save.folder}: rank 0 created {hidden.name} there, this rank does not see it; "
                              "a checkpoint needs a folder that all ranks share")
    part = RankPart(shared=content.shared if rank == 0 else None, private=content.private)
    try:
        for number, staged in enumerate(content.staged.files):
            path = hidden / f"rank{rank:05d}-{number:03d}.safetensors"
            written = write_rank_file(path, staged, rank, read_back=save.read_back)
            part.files.append(written.file)
            for piece, entry in zip(staged.pieces, written.ranges, strict=True):
                _stored(part, piece).ranges.append(entry)
    except OSError as error:
        raise _disk_full_error(error, save.folder, content.staged.bytes) from error
    for piece in content.staged.empty:
        _stored(part, piece)
    return part


def _stored(part: RankPart, piece: Piece) -> StoredTensor:
    empty = StoredTensor(shape=piece.shape, dtype=CODES[piece.data.dtype], ranges=[])
    return part.tensors.setdefault(piece.name, empty)


def _merged(save: _SaveOptions, parts: list[bytes]) -> Index:
    """Return the index; on rank 0."""
    return merge([parse_part(part) for part in parts], save.step)


def _write_index(hidden: Path, save: _SaveOptions, index: Index, here: list[File] | None) -> None:
    """Write the index, with which the checkpoint is complete, and which files are `here`; on the first rank of a folder."""
    if here is not None:
        (hidden / folders.HERE).write_text(json.dumps([file.name for file in here]))
    if faults := folders.faults(hidden, index):
        raise CheckpointError("this rank does not see the files of other ranks; a checkpoint needs a folder that all ranks "
                              "share:\n  " + "\n  ".join(faults))
    text = index.dump()
    try:
        with (hidden / INDEX).open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _disk_full_error(error, save.folder, len(text)) from error


def _publish(hidden: Path, save: _SaveOptions) -> None:
    """Rename the complete checkpoint to its tag; on the first rank of a folder."""
    try:
        folders.sync(hidden)
        folders.publish(save.folder, save.tag)
        if save.latest:
            folders.point_latest(save.folder, save.tag)
    except OSError as error:
        raise _disk_full_error(error, save.folder, 0) from error


def _retain(save: _SaveOptions) -> None:
    """Delete old checkpoints; on the first rank of a folder."""
    assert save.keep_last is not None
    for path in folders.retain(save.folder, save.keep_last, save.tag):
        logger.log(save.log_level, "removed the checkpoint %s", path)


def _disk_full_error(error: OSError, folder: Path, needed: int) -> Exception:
    full = disk_full(error, folder, needed)
    return error if full is None else CheckpointError(full)
