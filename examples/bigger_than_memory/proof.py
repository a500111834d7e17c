"""The proof: a small model trained with its state on disk and in memory has bit-identical losses and weights.

It compares all losses and the final weights, in fp32 and in bf16.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from model import Shape
from training import Case, batches, build, step

TINY = Shape(layers=2, dim=128, heads=2)
SMALL = Shape(layers=4, dim=384, heads=6)
"""Its blocks have more than 2^20 elements, so that a span has several chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of a training: the loss of every step, and a hash of the weights."""

    losses: tuple[float, ...]
    weights: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same training in one dtype, with and without the disk."""

    dtype: str
    with_tiers: Run
    without: Run

    @property
    def equal(self) -> bool:
        return self.with_tiers == self.without

    def __str__(self) -> str:
        if self.equal:
            return (f"{self.dtype}: {len(self.without.losses)} losses and all weights are equal to the last bit with and "
                    f"without the disk")
        pairs = list(zip(self.with_tiers.losses, self.without.losses, strict=True))
        apart = [number for number, (some, others) in enumerate(pairs, start=1) if some != others]
        if not apart:
            return f"{self.dtype}: the losses are equal with and without the disk, the weights after the last step are not"
        some, others = pairs[apart[0] - 1]
        return f"{self.dtype}: the losses differ from step {apart[0]} on: {some!r} with the disk, {others!r} without"


def prove(path: Path, shape: Shape, steps: int) -> Iterator[Comparison]:
    """Train `shape` in fp32 and in bf16, with its state in files under `path` and without."""
    for dtype in ("fp32", "bf16"):
        case = Case(shape=shape, dtype=dtype, steps=steps, block=32, path=path)
        yield Comparison(dtype=dtype, with_tiers=run(case), without=run(replace(case, path=None)))


def run(case: Case) -> Run:
    """Train a case, and free its memory."""
    engine = build(case)
    pairs = batches(case.block, engine.global_rank, case.seed)
    losses = tuple(step(engine, *next(pairs)) for _ in range(case.steps))
    engine.destroy()
    weights = _hash(engine.module)
    del engine
    gc.collect()  # modules and hooks reference each other
    return Run(losses=losses, weights=weights)


def _hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
