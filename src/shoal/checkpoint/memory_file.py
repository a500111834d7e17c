"""Files on a memory file system, mapped as tensors of bytes.

A `FilePool` has files that checkpoints link to (hard links) instead of copying them. A file that no checkpoint links to any
more is written anew: its pages exist already, so that nothing is allocated, zeroed or freed from one checkpoint to the next.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["FilePool", "map_file"]


def map_file(path: Path, size: int, *, new: bool) -> Tensor:
    """Return the bytes of a file as a tensor (size,) that is mapped to it; writes reach a `new` file alone.

    Raises OSError where memory has no room for a new file.
    """
    if new:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)  # a write to a mapped page without room would kill the process
            else:
                os.ftruncate(descriptor, size)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
    try:
        return torch.from_file(str(path), shared=new, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        if new:
            os.unlink(path)
        raise OSError(f"{path}: {error}") from error


class FilePool:
    """The files of one process in `folder`, which is on the file system of the checkpoints.

    `begin` and `take` raise OSError where memory has no room.
    """

    def __init__(self, folder: Path) -> None:
        """Remove what an earlier process left in `folder`; checkpoints keep what they link to."""
        self._folder = folder
        self._files: dict[Path, Tensor] = {}
        self._unused: list[Path] = []
        self._numbers = count()
        shutil.rmtree(folder, ignore_errors=True)

    def begin(self, sizes: Iterable[int]) -> None:
        """Begin a checkpoint of files of `sizes` bytes; remove files of other sizes to which no checkpoint links."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files = {path: file for path, file in self._files.items() if path.exists()}
        self._unused, wanted = [], Counter(sizes)
        for path in [path for path in self._files if path.stat().st_nlink == 1]:
            if wanted[self._files[path].numel()]:
                wanted[self._files[path].numel()] -= 1
                self._unused.append(path)
            else:
                path.unlink()
                del self._files[path]

    def take(self, size: int) -> tuple[Path, Tensor]:
        """Return a file of `size` bytes that nothing else uses, and its bytes (size,), of any contents."""
        found = next((path for path in self._unused if self._files[path].numel() == size), None)
        if found is not None:
            self._unused.remove(found)
            return found, self._files[found]
        path = self._folder / str(next(self._numbers))
        self._files[path] = map_file(path, size, new=True)
        return path, self._files[path]
