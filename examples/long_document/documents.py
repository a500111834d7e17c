"""Whole source files as bytes: streams to train on, files to be judged on, and the names that only one file has.

Files of the standard library of at least `SHORTEST` bytes are shuffled and put end to end, each ended by a zero byte; that
stream is cut into samples. About a fifth of the files is held out by a hash of its content, and each is read by itself.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).parents[1] / "gpt"))  # which files, and their order, are those of examples/gpt

from corpus import END, documents

SHORTEST = 8192
HELD_OUT_HASHES = 48
"""How many of the 256 values of a content hash's first byte mean held out."""

NAME = re.compile(rb"[A-Za-z_]\w{4,}")
"""A name; shorter ones are easily guessed."""

DEFINITION = re.compile(rb"^[ \t]*(?:async +)?(?:def|class|import|from)\b.*|^\w+ *=.*|^[ \t]+self\.\w+ *=.*", re.MULTILINE)
"""A line that defines names."""


@dataclass(frozen=True, slots=True)
class Library:
    """Files to train on and files to be judged on."""

    train: list[bytes]
    held_out: list[bytes]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A name that a file has used before: bytes [start, end), and how many bytes ago its last use began."""

    start: int
    end: int
    distance: int


def read_library(library: Path) -> Library:
    """Return the long files under `library`. Raises FileNotFoundError where one of the halves would be empty."""
    halves: dict[bool, list[bytes]] = {False: [], True: []}
    for content in documents(library):
        if len(content) >= SHORTEST:
            halves[hashlib.sha256(content).digest()[0] < HELD_OUT_HASHES].append(content)
    if not halves[False] or not halves[True]:
        raise FileNotFoundError(f"{library} holds too few Python sources of {SHORTEST:,} bytes; is the standard library of "
                                f"this interpreter installed with its sources?")
    return Library(train=halves[False], held_out=halves[True])


class Samples(Dataset[Tensor]):
    """Samples of `length` + 1 bytes, uint8: `count` of them, from files in an order that `seed` shuffles anew each epoch."""

    def __init__(self, files: Sequence[bytes], length: int, count: int, seed: int) -> None:
        self.length, self.count = length, count
        stream = bytearray()
        generator = random.Random(seed)
        while len(stream) < count * length + 1:
            stream += b"".join(each + END for each in generator.sample(files, len(files)))
        self.stream = torch.frombuffer(stream, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.stream[index * self.length:(index + 1) * self.length + 1]


def defining_blocks(text: bytes, block: int) -> Tensor:
    """Return which blocks of `text` have a part of a line that defines names: (blocks,) bool."""
    found = torch.zeros(-(-len(text) // block), dtype=torch.bool)
    for line in DEFINITION.finditer(text):
        found[line.start() // block:(line.end() - 1) // block + 1] = True
    return found


def names_of(files: Iterable[bytes]) -> set[bytes]:
    """Return all names in `files`."""
    return {name for text in files for name in NAME.findall(text)}


def recurrences(text: bytes, known: set[bytes]) -> Iterator[Recurrence]:
    """Yield the uses of names that are not `known` and that `text` has used before: nothing but the text tells them."""
    last: dict[bytes, int] = {}
    for found in NAME.finditer(text):
        name, start = found.group(), found.start()
        if name in last and name not in known:
            yield Recurrence(start, found.end(), start - last[name])
        last[name] = start
