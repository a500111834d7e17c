"""The same interpreter gives the same corpus: the sources of its own standard library, as bytes.

Documents are sorted by path, kept when they are UTF-8 and new by content, and sent to training or validation by a hash
of that content. Each split is one file in which every document ends with a zero byte, a byte that no source holds.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import os
import platform
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

END = b"\0"
"""Ends every document, and so also starts every generated one."""

SKIPPED_FOLDERS = frozenset({
    "site-packages", "dist-packages", "__pycache__",  # not the standard library
    "test", "tests", "idle_test", "lib2to3",  # inputs made to be odd
    "encodings", "pydoc_data",  # tables and prose
})

VALIDATION_HASHES = 8
"""How many of the 256 values of a content hash's first byte mean validation: about 3 % of the documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One half of the corpus: a file of bytes, and two measures of how far those bytes compress.

    `order0` is the entropy of the byte frequencies alone, `xz` what `xz -9` reaches on the file; both in bits per byte.
    They are NaN for training, which does not use them.
    """

    path: Path
    documents: int
    length: int
    order0: float = math.nan
    xz: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    train: Split
    validation: Split


def prepare(cache: Path, library: Path | None = None) -> Corpus:
    """Return the corpus of `library` (default: this interpreter's standard library), writing it on first use.

    Any number of processes may call this at once: each writes a folder of its own, and the first to rename it into
    place wins. Raises `FileNotFoundError` when `library` holds no Python sources.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    name = f"python-{platform.python_version()}-{hashlib.sha256(os.fsencode(library)).hexdigest()[:8]}"
    folder = cache / name
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f"{name}-") as temporary:
            staged = Path(temporary) / name
            staged.mkdir()
            _write(staged, documents(library), source=library)
            try:
                staged.rename(folder)
            except OSError:
                if not folder.exists():  # not lost to another process: a real failure
                    raise
    facts = json.loads((folder / "corpus.json").read_text())
    return Corpus(train=Split(path=folder / "train.bin", **facts["train"]),
                  validation=Split(path=folder / "validation.bin", **facts["validation"]))


def documents(library: Path) -> Iterator[bytes]:
    """Yield the sources under `library` in the order of their paths, each content once."""
    seen: set[bytes] = set()
    for path in sorted(library.rglob("*.py")):
        generated = path.name.startswith("_sysconfigdata")  # a dump of one machine's build
        if generated or not SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if content and digest not in seen and _is_text(content):
            seen.add(digest)
            yield content


def is_validation(content: bytes) -> bool:
    """Tell whether a document is held out; depends on its content alone, so no document is ever in both splits."""
    return hashlib.sha256(content).digest()[0] < VALIDATION_HASHES


def order0_entropy(data: bytes) -> float:
    """Return the entropy of the byte frequencies of `data`, in bits per byte (Shannon 1948, section 6)."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    shares = counts[counts > 0] / len(data)
    return float(-(shares * np.log2(shares)).sum())


def xz_bits_per_byte(data: bytes) -> float:
    """Return the size that `xz -9` gives `data`, in bits per byte of `data`."""
    return 8 * len(lzma.compress(data, preset=9)) / len(data)


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """A file of bytes as pairs (x, y) of `block` int64 bytes each, y being x moved on by one byte.

    Pair i starts at byte `i * stride` (default: `block`, so that the pairs predict every byte but the first once, up to
    a last partial block). The file stays on disk, memory-mapped.
    """

    def __init__(self, path: Path, block: int, stride: int | None = None) -> None:
        self.block = block
        self.stride = stride or block
        self.bytes = np.memmap(path, np.uint8, mode="r")
        if len(self.bytes) <= block:
            raise ValueError(f"{path}: got {len(self.bytes)} bytes; a block of {block} needs at least {block + 1}")

    def __len__(self) -> int:
        return (len(self.bytes) - 1 - self.block) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        window = torch.from_numpy(self.bytes[start:start + self.block + 1].astype(np.int64))
        return window[:-1], window[1:]


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return END not in content


def _write(folder: Path, contents: Iterable[bytes], source: Path) -> None:
    halves: dict[bool, list[bytes]] = {False: [], True: []}
    for content in contents:
        halves[is_validation(content)].append(content + END)
    facts: dict[str, dict[str, object]] = {}
    for name, half in (("train", halves[False]), ("validation", halves[True])):
        if not half:
            raise FileNotFoundError(f"no {name} documents: {source} holds too few Python sources (*.py); "
                                    "is the standard library of this interpreter installed with its sources?")
        data = b"".join(half)
        (folder / f"{name}.bin").write_bytes(data)
        facts[name] = {"documents": len(half), "length": len(data)}
    held_out = (folder / "validation.bin").read_bytes()
    facts["validation"] |= {"order0": order0_entropy(held_out), "xz": xz_bits_per_byte(held_out)}
    (folder / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
