"""Files on a memory file system, mapped as tensors of bytes.

A `FilePool` has files that checkpoints link to (hard links) instead of copying them. A file that no checkpoint links to any
more is written anew: its pages exist already, so that nothing is allocated, zeroed or freed from one checkpoint to the next.
"""

from __future__ import annotations

import os
import shutil
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
    return torch.from_file(str(path), shared=new, size=size, dtype=torch.uint8)


class FilePool:
    """The files of one process in `folder`, which is on the file system of the checkpoints."""

    def __init__(self, folder: Path) -> None:
        """Remove what an earlier process left in `folder`; checkpoints keep what they link to."""
        self._folder = folder
        self._files: dict[Path, Tensor] = {}
        self._numbers = count()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def take(self, size: int) -> tuple[Path, Tensor]:
        """Return a file of `size` bytes that no checkpoint links to, and its bytes (size,), of any contents.

        Raises OSError where memory has no room for it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files = {path: file for path, file in self._files.items() if path.exists()}
        unused = [path for path in self._files if path.stat().st_nlink == 1]
        found = next((path for path in unused if self._files[path].numel() == size), None)
        for path in unused:
            if path != found:
                path.unlink()
                del self._files[path]
        if found is None:
            found = self._folder / str(next(self._numbers))
            self._files[found] = map_file(found, size, new=True)
        return found, self._files[found]
