"""A save is a copy, then a conversation: stage the pieces, and a thread writes, checks and publishes them.

    every rank   stages its pieces and returns to training
    rank 0       removes what interrupted saves left, makes the hidden folder
    every rank   writes its files, syncs them, reads them back
    rank 0       merges the parts into the index, renames the folder to its tag, moves `latest`, retires old ones

After each line all ranks hear whether it succeeded everywhere. Until the rename nothing visible has changed, so a save that
fails, is killed, or finds the disk full leaves the previous checkpoint and `latest` as they were.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from shoal.checkpoint import folder as folders
from shoal.checkpoint.index import INDEX, RankPart, Stored, merge, parse_part
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.rank_file import disk_full, write_rank_file
from shoal.checkpoint.ranks import Ranks
from shoal.checkpoint.staging import Staged, Staging
from shoal.checkpoint.tensor_file import CODES
from shoal.checkpoint.values import encode
from shoal.errors import CheckpointError, RanksDisagree, UsageError
from shoal.log import logger

__all__ = ["FILE_BYTES", "PRIVATE", "SHARED", "PendingSave", "Writer", "settle", "write"]

SHARED, PRIVATE = "shared/", "private/"
FILE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """What one rank is to save."""

    staged: Staged
    shared: JsonValue
    private: JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """Where and how all ranks save it."""

    folder: Path
    tag: str
    step: int
    latest: bool
    keep_last: int | None
    read_back: bool


class PendingSave:
    """A save that may still be under way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failure: BaseException | None = None
        self._taken = threading.Lock()
        self._ended = threading.Event()
        self._seen = False

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> Path:
        """Wait until the checkpoint stands and return its folder; raises CheckpointError, on every rank, if it failed."""
        self._ended.wait()
        self._seen = True
        if self._failure is not None:
            raise self._failure
        return self.path

    def settle(self) -> None:
        """Wait until the save has ended, well or not."""
        self._ended.wait()

    def surface(self) -> None:
        """Wait, and raise a failure unless `wait` has raised it already."""
        self._ended.wait()
        if not self._seen:
            self.wait()

    def seen(self) -> None:
        """Note that the caller has been told of the failure."""
        self._ended.wait()
        self._seen = True

    def begin(self) -> None:
        """Have those wait who ask for it, until `end`."""
        _under_way.add(self)

    def take(self) -> bool:
        """Take the save over, to carry it out and end it; returns whether nobody else has."""
        return self._taken.acquire(blocking=False)

    def end(self, failure: BaseException | None) -> None:
        """Let those who wait go on."""
        self._failure = failure
        self._ended.set()
        _under_way.discard(self)


_under_way: set[PendingSave] = set()
"""The saves of this process that have not ended, whoever began them."""


def settle() -> None:
    """Wait for every save that this process has begun: who reads afterwards finds what was saved before.

    A failure is left to those who began the save.
    """
    for pending in tuple(_under_way):  # copied at once: others may begin and end meanwhile
        pending.settle()


class Writer:
    """Saves one checkpoint after the other; keeps the staging buffer between them."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        """Write with `ranks` (see `Ranks.join`); None: this process alone."""
        self.ranks = ranks or Ranks()
        self._staging = Staging()
        self._pending: PendingSave | None = None

    def wait(self) -> None:
        """Wait for the save that is under way, if any; raises its CheckpointError unless that was raised already."""
        if self._pending is not None:
            self._pending.surface()

    def write(self, folder: str | os.PathLike[str], tag: str, pieces: Iterable[Piece], *, step: int = 0,
              shared: dict[str, object] | None = None, private: dict[str, object] | None = None, latest: bool = True,
              keep_last: int | None = None, read_back: bool = True, file_bytes: int = FILE_BYTES) -> PendingSave:
        """Begin to save `pieces` as `folder/tag`; every rank calls it.

        On return the pieces may change again. Over all ranks they are disjoint and cover every tensor. `shared` is kept
        from rank 0 and `private` from every rank (what `values.encode` takes). `latest` moves the file of that name,
        `keep_last` then retires all but so many checkpoints, `read_back` compares what the disk holds with what was
        meant, `file_bytes` bounds a file. An earlier save is waited for first.

        Raises UsageError (an impossible tag or `keep_last`, a value that needs pickle) and CheckpointError (impossible
        pieces, or the earlier save's failure if nobody has seen it). The other ranks learn of it from `PendingSave.wait`.
        """
        self.wait()
        save = _Save(folder=Path(folder), tag=tag, step=step, latest=latest, keep_last=keep_last, read_back=read_back)
        pending = PendingSave(save.folder / tag)
        self.ranks.turn.acquire()  # given back when the save has ended
        try:
            self._pending = pending
            pending.begin()
            _refuse_options(save)
            content = self._stage(pieces, shared or {}, private or {}, file_bytes)
            threading.Thread(target=self._run, args=(save, content, pending), name=f"shoal-save-{tag}").start()
        except BaseException as error:
            told = error if isinstance(error, Exception) else CheckpointError(f"interrupted by {type(error).__name__}")
            self._run(save, told, pending)  # the other ranks have begun: tell them, unless the thread runs already
            pending.seen()
            raise
        return pending

    def _stage(self, pieces: Iterable[Piece], shared: dict[str, object], private: dict[str, object],
               file_bytes: int) -> _Content:
        common, own = encode(shared), encode(private)
        named = [(f"{PRIVATE}{self.ranks.rank}/{i}", value) for i, value in enumerate(own.tensors)]
        if self.ranks.rank == 0:
            named += [(f"{SHARED}{i}", value) for i, value in enumerate(common.tensors)]
        values = [Piece(name=name, shape=tuple(value.shape), start=0, stop=value.numel(), data=value.reshape(-1))
                  for name, value in named]
        staged = self._staging.copy([*pieces, *values], file_bytes)
        return _Content(staged=staged, shared=common.json, private=own.json)

    def _run(self, save: _Save, content: _Content | Exception, pending: PendingSave) -> None:
        """Hold the whole conversation; the thread's body. It is no daemon: the interpreter waits for it before it ends.

        Who comes second, as where an interrupt of the one that started the thread made it look as if none had, does nothing.
        """
        if not pending.take():
            return
        failure: BaseException | None = None
        try:
            _converse(self.ranks, save, content)
        except BaseException as error:  # surfaces in Pending.wait, or at the next save
            failure = error
            logger.error("the checkpoint %s was not saved: %s", pending.path, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.ranks.turn.release()
            pending.end(failure)
        if failure is not None and not threading.main_thread().is_alive():
            raise failure  # nobody is left to wait for it: let the interpreter print it


def write(folder: str | os.PathLike[str], tag: str, pieces: Iterable[Piece], *, ranks: Ranks | None = None, step: int = 0,
          shared: dict[str, object] | None = None, private: dict[str, object] | None = None) -> Path:
    """Save one checkpoint and wait for it; see `Writer.write`."""
    return Writer(ranks).write(folder, tag, pieces, step=step, shared=shared, private=private).wait()


def _refuse_options(save: _Save) -> None:
    folders.saving_path(save.folder, save.tag)
    if save.keep_last is not None and save.keep_last < 1:
        raise UsageError(f"keep_last: got {save.keep_last}; keep at least 1 checkpoint, or None to keep all")


def _converse(ranks: Ranks, save: _Save, content: _Content | Exception) -> None:
    places = [os.fsdecode(place) for place in ranks.exchange(os.fsencode(save.folder / save.tag))]
    if len(set(places)) > 1:
        raise RanksDisagree(f"ranks save to different places, rank 0 to {places[0]}, rank {_other(places)} to "
                            f"{places[_other(places)]}; give every rank the same folder and tag")
    doing = f"could not save {places[0]}"
    with ExitStack() as held:
        ready = ranks.together(doing, lambda: _prepare(save, content, held, ranks.rank))
        hidden = folders.saving_path(save.folder, save.tag)
        try:
            part = ranks.together(doing, lambda: _write_part(hidden, save, ready, ranks.rank))
            parts = ranks.gather(part.dump())
            ranks.together(doing, lambda: _commit(hidden, save, parts) if ranks.rank == 0 else None)
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)
            raise


def _other(places: list[str]) -> int:
    return next(rank for rank, place in enumerate(places) if place != places[0])


def _prepare(save: _Save, content: _Content | Exception, held: ExitStack, rank: int) -> _Content:
    if isinstance(content, Exception):
        raise content
    if rank == 0:
        save.folder.mkdir(parents=True, exist_ok=True)
        folders.clean(save.folder, save.tag)
        hidden = folders.saving_path(save.folder, save.tag)
        hidden.mkdir()
        held.enter_context(folders.lock(hidden, shared=False))
    return content


def _write_part(hidden: Path, save: _Save, content: _Content, rank: int) -> RankPart:
    """Write the files of one rank and describe them."""
    if not hidden.is_dir():
        raise CheckpointError(f"{save.folder}: rank 0 made {hidden.name} there, this rank does not see it; "
                              "a checkpoint needs a folder that all ranks share")
    part = RankPart(shared=content.shared if rank == 0 else None, private=content.private)
    try:
        for number, staged in enumerate(content.staged.files):
            path = hidden / f"rank{rank:05d}-{number:03d}.safetensors"
            written = write_rank_file(path, staged, rank, read_back=save.read_back)
            part.files.append(written.file)
            for piece, found in zip(staged.pieces, written.ranges, strict=True):
                _stored(part, piece).ranges.append(found)
    except OSError as error:
        raise _explained(error, save.folder, content.staged.bytes) from error
    for piece in content.staged.empty:
        _stored(part, piece)
    return part


def _stored(part: RankPart, piece: Piece) -> Stored:
    empty = Stored(shape=piece.shape, dtype=CODES[piece.data.dtype], ranges=[])
    return part.tensors.setdefault(piece.name, empty)


def _commit(hidden: Path, save: _Save, parts: list[bytes]) -> None:
    """Publish what all ranks wrote; on rank 0."""
    index = merge([parse_part(part) for part in parts], save.step)
    if faults := folders.faults(hidden, index):
        raise CheckpointError("this rank does not see what others wrote; a checkpoint needs a folder that all ranks "
                              "share:\n  " + "\n  ".join(faults))
    text = index.dump()
    try:
        with (hidden / INDEX).open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        folders.sync(hidden)
        folders.publish(save.folder, save.tag)
        if save.latest:
            folders.point_latest(save.folder, save.tag)
    except OSError as error:
        raise _explained(error, save.folder, len(text)) from error
    if save.keep_last is not None:
        folders.retain(save.folder, save.keep_last, save.tag)


def _explained(error: OSError, folder: Path, needed: int) -> Exception:
    full = disk_full(error, folder, needed)
    return error if full is None else CheckpointError(full)
