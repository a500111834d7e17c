"""A checkpoint appears and disappears under its tag by one rename, so every visible tag folder is complete.

The file `latest` contains the tag that was saved last. Incomplete checkpoints have hidden names:

    .shoal-saving-TAG      being written; garbage after a crash
    .shoal-replaced-TAG    being replaced by a new checkpoint of the same tag; still valid if TAG is missing
    .shoal-removed-*       being deleted; garbage after a crash

Readers and writers hold a file lock on the folder that they use, so that no other process removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shoal.checkpoint.index import INDEX, File, Index, parse
from shoal.errors import CheckpointDamaged, CheckpointError, UsageError

__all__ = [
    "Tag",
    "clean",
    "faults",
    "files_here",
    "incomplete",
    "intact_alternative",
    "latest",
    "load_index",
    "locate",
    "lock",
    "point_latest",
    "publish",
    "resolve",
    "retain",
    "saving_path",
    "sync",
    "tags",
]

LATEST = "latest"
HERE = "here.json"
"""The file that lists the files of a folder which has a part of the checkpoint."""
SAVING = ".shoal-saving-"
REPLACED = ".shoal-replaced-"
REMOVED = ".shoal-removed-"
WRITTEN_WITHIN = 3600.0
"""Seconds within which a running save writes something, on a file system without locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """One complete checkpoint in a folder."""

    name: str
    path: Path
    step: int


def saving_path(folder: Path, tag: str) -> Path:
    """Return the hidden folder in which checkpoint `tag` is written. Raises UsageError if `tag` is not a plain name."""
    if not tag or tag == LATEST or tag.startswith(".") or Path(tag).name != tag or "\\" in tag or not tag.isprintable():
        raise UsageError(f"checkpoint tag: got {tag!r}; a tag is a folder name: not empty, no slash, "
                         f"printable, no leading dot, and not {LATEST!r}; for example 'global_step100'")
    return folder / (SAVING + tag)


def locate(folder: Path, tag: str) -> Path | None:
    """Return the folder of the checkpoint `tag`, or None."""
    candidates = (folder / tag, folder / (REPLACED + tag))
    return next((path for path in candidates if path.is_dir()), None)


def latest(folder: Path) -> str | None:
    """Return the tag that was saved last, or None if there is none."""
    try:
        return (folder / LATEST).read_text().strip() or None
    except FileNotFoundError:
        return None


def point_latest(folder: Path, tag: str) -> None:
    """Write `tag` to the file `latest`, atomically; nothing else, since scripts join what they read to the folder."""
    draft = folder / f"{SAVING}{LATEST}"
    with draft.open("w") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, folder / LATEST)
    sync(folder)


def tags(folder: Path) -> list[Tag]:
    """Return the complete checkpoints (valid index, every file present with its size) by step, oldest first."""
    complete: list[tuple[int, int, Tag]] = []
    for name in _names(folder):
        path = locate(folder, name)
        with suppress(CheckpointError, OSError):
            assert path is not None
            index = load_index(path)
            if not faults(path, index):
                tag = Tag(name=name, path=path, step=index.step)
                complete.append((tag.step, (path / INDEX).stat().st_mtime_ns, tag))
    return [tag for *_, tag in sorted(complete, key=lambda entry: entry[:2])]


def incomplete(folder: Path) -> dict[Path, str]:
    """Return the checkpoint folders in `folder` that are damaged, and what is wrong with each.

    A folder that cannot be read at present, as by a process without free file descriptors, is not damaged.
    """
    wrong: dict[Path, str] = {}
    for name in sorted(_names(folder)):
        path = locate(folder, name)
        if path is None:  # removed meanwhile
            continue
        try:
            found = faults(path, load_index(path))
        except CheckpointError as error:
            found = [str(error)]
        except OSError:
            continue
        if found:
            wrong[path] = "; ".join(found)
    return wrong


def resolve(folder: Path, tag: str | None) -> str:
    """Return `tag`, or the latest tag if None. Raises CheckpointError, with the existing tags, if there is none."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    name = latest(folder) if tag is None else tag
    if name is None:
        raise CheckpointError(f"{folder}: has no {LATEST!r} file; give a tag; {_choice(folder)}")
    if locate(folder, name) is None:
        source = f"{LATEST!r} names {name!r}, but there is" if tag is None else "there is"
        raise CheckpointError(f"{folder}: {source} no checkpoint {name!r}; {_choice(folder)}")
    return name


def load_index(path: Path) -> Index:
    """Read the index of the checkpoint folder `path`. Raises CheckpointDamaged if it is missing or damaged."""
    try:
        text = (path / INDEX).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointDamaged(f"{path}: has no {INDEX}, so it is not a checkpoint, or it is damaged") from None
    return parse(text, path / INDEX)


def files_here(path: Path, index: Index) -> list[File]:
    """Return the files that the checkpoint folder `path` is to have: all of them, unless other nodes have the rest.

    Raises CheckpointError if the list of them is damaged.
    """
    try:
        here = set(cast("list[str]", json.loads((path / HERE).read_text())))
    except FileNotFoundError:
        return index.files
    except (ValueError, TypeError):
        raise CheckpointError(f"{path / HERE}: damaged, it is no list of files") from None
    return [file for file in index.files if file.name in here]


def faults(path: Path, index: Index) -> list[str]:
    """List the files of a checkpoint folder that are missing or whose size differs from the index."""
    messages: list[str] = []
    for file in files_here(path, index):
        try:
            size = (path / file.name).stat().st_size
        except FileNotFoundError:
            messages.append(f"{path / file.name} (rank {file.rank}): missing")
            continue
        if size != file.size:
            word = "truncated" if size < file.size else "too long"
            messages.append(f"{path / file.name} (rank {file.rank}): {word}, got {size} bytes, expected {file.size}")
    return messages


def intact_alternative(folder: Path, tag: str) -> str:
    """Suggest the newest intact checkpoint in place of the damaged `tag`."""
    others = [other.name for other in tags(folder) if other.name != tag]
    if not others:
        return f"{folder} has no other complete checkpoint"
    return f"the newest intact checkpoint in the folder is {others[-1]!r}: load it with tag={others[-1]!r}"


# -- modifications: only rank 0 of a save calls these -------------------------
def clean(folder: Path, tag: str) -> None:
    """Remove the leftovers of interrupted saves and check that `tag` can be written.

    Raises CheckpointError if another process is saving `tag`, or a folder named `tag` exists and is not a checkpoint.
    """
    for path in sorted(folder.glob(".shoal-*")):
        if path.name.startswith(REPLACED) and not (visible := folder / path.name.removeprefix(REPLACED)).exists():
            os.rename(path, visible)
        elif path.name.startswith(REPLACED):
            _remove(path)
        elif path.is_dir() and not _in_use(path, unknown=path != saving_path(folder, tag) and _written_lately(path)):
            shutil.rmtree(path)
    if saving_path(folder, tag).exists():
        raise CheckpointError(f"{folder}: another process is saving {tag!r} in this folder")
    if (folder / tag).exists() and not (folder / tag / INDEX).exists():
        raise CheckpointError(f"{folder / tag}: exists and is not a checkpoint, so it is not replaced; "
                              "choose another tag or remove it")


def publish(folder: Path, tag: str) -> None:
    """Rename the finished checkpoint to its tag. A previous checkpoint of this tag stays complete until then."""
    old, replaced = folder / tag, folder / (REPLACED + tag)
    if replaced.exists():
        _remove(replaced)
    if old.exists():
        os.rename(old, replaced)
    os.rename(saving_path(folder, tag), old)
    sync(folder)
    if replaced.exists():
        _remove(replaced)


def retain(folder: Path, keep: int, spare: str) -> Iterator[Path]:
    """Remove all complete checkpoints except the newest `keep`, `spare`, the latest, and those in use by a reader.

    Yields each when it is gone.
    """
    for tag in tags(folder)[:-keep]:
        if tag.name not in (spare, latest(folder)) and not _in_use(tag.path):
            _remove(tag.path)
            yield tag.path


def sync(folder: Path) -> None:
    """Make renames and new files in `folder` durable (fsync of the folder)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(path: Path, *, shared: bool) -> Generator[int]:
    """Open the folder `path` and lock it, so that other processes do not remove it. Yields the descriptor."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)


def _written_lately(path: Path) -> bool:
    """Whether something in the folder `path` was written so lately that the save may still be running."""
    return time.time() - max(entry.stat().st_mtime for entry in (path, *path.iterdir())) < WRITTEN_WITHIN


def _in_use(path: Path, *, unknown: bool = False) -> bool:
    """Whether another process holds a lock on the folder `path`; `unknown` where the file system has no locks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return unknown
    finally:
        os.close(descriptor)
    return False


def _remove(path: Path) -> None:
    """Hide a checkpoint by one rename, then delete it, so that no tag ever names an incomplete checkpoint.

    A checkpoint in use by a reader stays hidden; a later save deletes it.
    """
    hidden = path.with_name(REMOVED + uuid.uuid4().hex)
    os.rename(path, hidden)
    if not _in_use(hidden):
        shutil.rmtree(hidden)


def _names(folder: Path) -> set[str]:
    names = {path.name.removeprefix(REPLACED) for path in folder.glob("*/") if path.is_dir()}
    return {name for name in names if not name.startswith(".")}


def _choice(folder: Path) -> str:
    names = ", ".join(tag.name for tag in tags(folder))
    return f"existing tags: {names}" if names else "it has no checkpoint"
