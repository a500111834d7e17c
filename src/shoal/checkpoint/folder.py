"""A folder of checkpoints holds one visible folder per complete checkpoint, and `latest`, the tag that was saved last.

Whatever is not complete is hidden: a checkpoint appears and disappears under its tag by one rename.

    .shoal-saving-TAG      being written; after a crash: rubbish
    .shoal-replaced-TAG    the checkpoint that a new one of the same tag replaces; if TAG is missing, it is still TAG
    .shoal-removed-*       being deleted; after a crash: rubbish

Readers and writers hold a lock on the folder that they use, so that no other process removes it meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.index import INDEX, Index, parse
from shoal.errors import CheckpointError, UsageError
from shoal.log import logger

__all__ = [
    "Tag",
    "beside",
    "clean",
    "faults",
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
SAVING = ".shoal-saving-"
REPLACED = ".shoal-replaced-"
REMOVED = ".shoal-removed-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """One complete checkpoint of a folder."""

    name: str
    path: Path
    step: int


def saving_path(folder: Path, tag: str) -> Path:
    """Return where the checkpoint `tag` rests while it is written; raises UsageError when `tag` names no plain folder."""
    if not tag or tag == LATEST or tag.startswith(".") or Path(tag).name != tag or "\\" in tag or not tag.isprintable():
        raise UsageError(f"checkpoint tag: got {tag!r}; a tag is the name of one folder: not empty, no slash, "
                         f"nothing unprintable, no dot at its beginning, and not {LATEST!r}; for example 'global_step100'")
    return folder / (SAVING + tag)


def locate(folder: Path, tag: str) -> Path | None:
    """Return the folder of the checkpoint `tag`, or None."""
    candidates = (folder / tag, folder / (REPLACED + tag))
    return next((path for path in candidates if path.is_dir()), None)


def latest(folder: Path) -> str | None:
    """Return the tag that was saved last, or None when nothing was."""
    try:
        return (folder / LATEST).read_text().strip() or None
    except FileNotFoundError:
        return None


def point_latest(folder: Path, tag: str) -> None:
    """Make `tag` the latest, atomically."""
    draft = folder / f"{SAVING}{LATEST}"
    with draft.open("w") as file:
        file.write(tag + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, folder / LATEST)
    sync(folder)


def tags(folder: Path) -> list[Tag]:
    """Return the complete checkpoints (index intact, every file there in its size) by step, oldest first."""
    found: list[tuple[int, int, Tag]] = []
    for name in _names(folder):
        path = locate(folder, name)
        with suppress(CheckpointError, OSError):
            assert path is not None
            index = load_index(path)
            if not faults(path, index):
                tag = Tag(name=name, path=path, step=index.step)
                found.append((tag.step, (path / INDEX).stat().st_mtime_ns, tag))
    return [tag for *_, tag in sorted(found, key=lambda entry: entry[:2])]


def resolve(folder: Path, tag: str | None) -> str:
    """Return `tag`, or what `latest` says; raises CheckpointError with the tags that are there."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    name = latest(folder) if tag is None else tag
    if name is None:
        raise CheckpointError(f"{folder}: nothing is named {LATEST!r} there, so say which tag; {_choice(folder)}")
    if locate(folder, name) is None:
        source = f"{LATEST!r} says {name!r}, but there is" if tag is None else "there is"
        raise CheckpointError(f"{folder}: {source} no checkpoint {name!r}; {_choice(folder)}")
    return name


def load_index(path: Path) -> Index:
    """Read the index of the checkpoint folder `path`; raises CheckpointError when it is missing or damaged."""
    try:
        text = (path / INDEX).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: no {INDEX}, so this is no checkpoint, or a damaged one") from None
    return parse(text, path / INDEX)


def faults(path: Path, index: Index) -> list[str]:
    """Say which files of a checkpoint are missing or have another size than the index says."""
    found: list[str] = []
    for file in index.files:
        try:
            size = (path / file.name).stat().st_size
        except FileNotFoundError:
            found.append(f"{path / file.name} (rank {file.rank}): missing")
            continue
        if size != file.size:
            word = "truncated" if size < file.size else "too long"
            found.append(f"{path / file.name} (rank {file.rank}): {word}, got {size} bytes, expected {file.size}")
    return found


def beside(folder: Path, tag: str) -> str:
    """Say which checkpoint could be loaded instead of the damaged `tag`."""
    others = [other.name for other in tags(folder) if other.name != tag]
    if not others:
        return f"no other complete checkpoint is in {folder}"
    return f"the newest intact one beside it is {others[-1]!r}: load it with tag={others[-1]!r}"


# -- changes: by one process at a time, the rank 0 that saves ----------------
def clean(folder: Path, tag: str) -> None:
    """Remove what interrupted saves left, and make sure that `tag` may be written.

    Raises CheckpointError when another process is saving `tag`, or when a folder that is no checkpoint has its name.
    """
    for path in sorted(folder.glob(".shoal-*")):
        if path.name.startswith(REPLACED) and not (whole := folder / path.name.removeprefix(REPLACED)).exists():
            os.rename(path, whole)
        elif path.name.startswith(REPLACED):
            _remove(path)
        elif path.is_dir() and not _in_use(path):
            shutil.rmtree(path)
    if saving_path(folder, tag).exists():
        raise CheckpointError(f"{folder}: another process is saving {tag!r} there right now")
    if (folder / tag).exists() and not (folder / tag / INDEX).exists():
        raise CheckpointError(f"{folder / tag}: exists and is no checkpoint, so it is not replaced; "
                              "choose another tag or remove it")


def publish(folder: Path, tag: str) -> None:
    """Rename the finished checkpoint to its tag; one that had this tag stays complete until the new one stands."""
    old, replaced = folder / tag, folder / (REPLACED + tag)
    if replaced.exists():
        _remove(replaced)
    if old.exists():
        os.rename(old, replaced)
    os.rename(saving_path(folder, tag), old)
    sync(folder)
    if replaced.exists():
        _remove(replaced)


def retain(folder: Path, keep: int, spare: str) -> None:
    """Remove all complete checkpoints but the newest `keep`; never `spare`, the latest, or one that is being read."""
    for tag in tags(folder)[:-keep]:
        if tag.name not in (spare, latest(folder)) and not _in_use(tag.path):
            logger.info("removing the checkpoint %s", tag.path)
            _remove(tag.path)


def sync(folder: Path) -> None:
    """Make renames and new files within `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(path: Path, *, shared: bool) -> Generator[int]:
    """Open the folder `path` and keep other processes from removing it; yields the descriptor."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: the folder is as safe as it can be there
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)


def _in_use(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _remove(path: Path) -> None:
    """Hide a checkpoint by one rename, then delete it, so that half of one never stands under a tag.

    One that is being read stays hidden; a later save deletes it.
    """
    grave = path.with_name(REMOVED + uuid.uuid4().hex)
    os.rename(path, grave)
    if not _in_use(grave):
        shutil.rmtree(grave)


def _names(folder: Path) -> set[str]:
    found = {path.name.removeprefix(REPLACED) for path in folder.glob("*/") if path.is_dir()}
    return {name for name in found if not name.startswith(".")}


def _choice(folder: Path) -> str:
    found = ", ".join(tag.name for tag in tags(folder))
    return f"tags there: {found}" if found else "no checkpoint is there"
