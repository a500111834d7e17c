"""Bits per byte of files that were held out: by position, and of names by how far back their last use is.

Names count that no file of the training has and that the file itself has used before: only its text can tell them.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
from torch import Tensor

from documents import recurrences

EDGES = (0, 256, 1024, 3200, 8000, 32_000)
"""Bytes since the last use, at which groups of names begin and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Some bytes, and the mean of their bits."""

    name: str
    bytes: int
    bits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Bits per byte: of everything, of where a dense reader sees the whole text before, of the rest; and of names."""

    parts: list[Group]
    names: list[Group]

    def facts(self) -> dict[str, list[dict[str, object]]]:
        """Return this as JSON."""
        return {"parts": [asdict(each) for each in self.parts], "names": [asdict(each) for each in self.names]}


class Tally:
    """Collects the bits of file after file; `near` is the position up to which a dense reader sees everything before."""

    def __init__(self, known: set[bytes], near: int) -> None:
        self.known, self.near = known, near
        self.positions: dict[str, list[Tensor]] = {"all": [], "near": [], "far": []}
        self.distances: list[list[Tensor]] = [[] for _ in EDGES[1:]]

    def add(self, text: bytes, bits: Tensor) -> None:
        """Take the bits (len(text),) of the bytes of a file."""
        for name, part in (("all", bits), ("near", bits[:self.near]), ("far", bits[self.near:])):
            self.positions[name].append(part)
        for use in recurrences(text, self.known):
            self.distances[min(bisect(EDGES, use.distance), len(EDGES) - 1) - 1].append(bits[use.start:use.end])

    def score(self) -> Score:
        """Return the means."""
        labels = [f"{low:,} to {high:,}" for low, high in pairwise(EDGES)]
        return Score(parts=[_group(name, parts) for name, parts in self.positions.items()],
                     names=[_group(name, parts) for name, parts in zip(labels, self.distances, strict=True)])


def _group(name: str, parts: list[Tensor]) -> Group:
    whole = torch.cat([*parts, torch.empty(0)])
    return Group(name=name, bytes=len(whole), bits=float(whole.mean()) if len(whole) else float("nan"))
