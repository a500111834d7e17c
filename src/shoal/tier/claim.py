"""A file of one's own in a folder that many share, removed by its owner, or by who comes after a killed one.

    <folder>/shoal-swap-<host>-<process>-<random>/rank<R>.swap

The owner keeps the file locked as long as it lives, however it dies; so what is not locked is nobody's. The folder itself is
locked while a file is made and while dead ones are looked for: a file that is not locked yet is never taken for dead.
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
    """A locked file: its path, its open descriptor, and whether it is read and written directly, past the page cache."""

    path: Path
    descriptor: int
    direct: bool

    def remove(self) -> None:
        """Remove the file and its folder. Only the process that made them may do so."""
        with suppress(OSError):
            self.path.unlink()
        with suppress(OSError):
            self.path.parent.rmdir()


def claim(folder: str | Path, rank: int) -> Claim:
    """Remove what killed runs left in `folder`, and make a file there for `rank`; raises TierError."""
    check_folder(folder)
    place = Path(folder).resolve()
    try:
        with _alone(place) as alone:
            if alone:
                _sweep(place)
            return _made(place / f"{_prefix()}{os.getpid()}-{secrets.token_hex(4)}" / f"rank{rank}.swap")
    except OSError as error:
        raise TierError(f"rank {rank}: no file could be made in {place}: {error.strerror}; give a folder of a fast local "
                        f"disk in nvme_path") from error


def _made(path: Path) -> Claim:
    path.parent.mkdir(mode=0o700)
    try:
        return _opened(path)
    except BaseException:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise


def _opened(path: Path) -> Claim:
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
        warn_once(f"{path.parent.parent} has no direct I/O ({error.strerror}): its files go through the system's cache, "
                  f"which takes memory and processor time. Give a folder of a local disk (ext4, xfs) in nvme_path")
        descriptor, direct = os.open(path, flags, 0o600), False
    with suppress(OSError):  # a file system without locks, where nobody sweeps
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Claim(path=path, descriptor=descriptor, direct=direct)


def _try_direct(descriptor: int) -> None:
    """Write one block: some file systems refuse only then."""
    with mmap.mmap(-1, ALIGNMENT) as block:
        os.pwrite(descriptor, block, 0)
    os.ftruncate(descriptor, 0)


@contextmanager
def _alone(place: Path) -> Generator[bool]:
    """Keep others from looking for dead files in `place`; yields False where the file system has no locks."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _sweep(place: Path) -> None:
    """Remove the folders in `place` whose files nobody has locked; of other hosts only on a disk of this one.

    A container may have another host's name each time. On a network file system a lock may be its own host's alone.
    """
    local = not is_network(place)
    pattern = re.compile((r"shoal-swap-.+-" if local else re.escape(_prefix())) + r"\d+-[0-9a-f]{8}")
    for folder in place.iterdir():
        if pattern.fullmatch(folder.name) and not any(map(_is_locked, _inside(folder))):
            shutil.rmtree(folder, ignore_errors=True)


def _inside(folder: Path) -> list[Path]:
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def _is_locked(file: Path) -> bool:
    """Whether somebody has `file` locked; true as well where that cannot be known."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except FileNotFoundError:  # its owner was faster
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
