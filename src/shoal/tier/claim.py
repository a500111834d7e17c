"""A private file in a shared folder. Its owner removes it; after a kill the next run in the folder does.

    <folder>/shoal-swap-<host>-<process>-<random>/rank<R>.swap

The owner holds a lock on its file until it exits in any way, so an unlocked file is stale. The shared folder is locked while
a file is created and while stale ones are removed, so that a new file is never seen unlocked.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import TierError
from shoal.log import warn_once
from shoal.tier.extents import ALIGNMENT
from shoal.tier.folder_check import check_folder, is_network

__all__ = ["Claim", "claim"]

_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A locked file: its path, its open descriptor, and whether it uses direct I/O, past the page cache."""

    path: Path
    descriptor: int
    direct: bool

    def remove(self) -> None:
        """Remove the file and its folder. Only the process that created them may do so."""
        with suppress(OSError):
            self.path.unlink()
        with suppress(OSError):
            self.path.parent.rmdir()


def claim(folder: str | Path, rank: int) -> Claim:
    """Remove the files of killed runs in `folder`, and create a file for `rank`; raises TierError."""
    check_folder(folder)
    parent = Path(folder).resolve()
    try:
        with _locked(parent) as locked:
            if locked:
                _remove_stale(parent)
            return _create(parent / f"{_prefix()}{os.getpid()}-{secrets.token_hex(4)}" / f"rank{rank}.swap")
    except OSError as error:
        raise TierError(f"rank {rank}: could not create a file in {parent}: {error.strerror}; give a folder of a fast local "
                        f"disk in nvme_path") from error


def _create(path: Path) -> Claim:
    path.parent.mkdir(mode=0o700)
    try:
        return _open(path)
    except BaseException:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise


def _open(path: Path) -> Claim:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    descriptor = -1
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
        _try_direct(descriptor)
        direct = True
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno not in _REFUSED:
            raise
        warn_once(f"{path.parent.parent} does not support direct I/O ({error.strerror}): swap files use the page cache, "
                  f"which takes memory and processor time. Give a folder of a local disk (ext4, xfs) in nvme_path")
        descriptor, direct = os.open(path, flags, 0o600), False
    with suppress(OSError):  # a file system without locks, where stale files are kept
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Claim(path=path, descriptor=descriptor, direct=direct)


def _try_direct(descriptor: int) -> None:
    """Write one block: some file systems refuse direct I/O only then."""
    with mmap.mmap(-1, ALIGNMENT) as block:
        os.pwrite(descriptor, block, 0)
    os.ftruncate(descriptor, 0)


@contextmanager
def _locked(folder: Path) -> Generator[bool]:
    """Lock `folder` against other processes; yields False where the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove_stale(parent: Path) -> None:
    """Remove the folders in `parent` whose files no process has locked; those of other host names only on a local disk.

    Every container may have another host name. On a network file system a lock may be visible on its own host only.
    """
    local = not is_network(parent)
    pattern = re.compile((r"shoal-swap-.+-" if local else re.escape(_prefix())) + r"\d+-[0-9a-f]{8}")
    for folder in parent.iterdir():
        if pattern.fullmatch(folder.name) and not any(map(_is_locked, _files_in(folder))):
            shutil.rmtree(folder, ignore_errors=True)


def _files_in(folder: Path) -> list[Path]:
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def _is_locked(file: Path) -> bool:
    """Whether a process has `file` locked; also true if that cannot be determined."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except FileNotFoundError:  # its owner removed it
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _prefix() -> str:
    return f"shoal-swap-{os.uname().nodename}-"
