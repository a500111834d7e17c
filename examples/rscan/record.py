"""The record of a run: its progress at each evaluation, and the figures derived from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation. `seconds` are those of training alone, without evaluations and checkpoints."""

    step: int
    samples: int
    seconds: float
    auc: float
    loss: float


@dataclass(slots=True, kw_only=True)
class Record:
    """A run: what it trained on how many ranks, and its evaluations in their order; the first is before training."""

    system: str
    ranks: int
    seed: int
    rate: str = ""
    """Of the link between two hosts; empty on one machine."""
    bytes_per_step: float = 0.0
    """Bytes that a rank sends in a step."""
    points: list[Point] = field(default_factory=list[Point])

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        facts = json.loads(path.read_text())
        return cls(**{**facts, "points": [Point(**point) for point in facts["points"]]})

    @property
    def samples_per_second(self) -> float:
        """The pace after the first evaluation that followed a step, for the first steps find cold caches."""
        first, last = (self.points[index] for index in (min(1, len(self.points) - 2), -1))
        return (last.samples - first.samples) / (last.seconds - first.seconds)

    def seconds_to(self, target: float) -> float | None:
        """Return the training seconds until the AUC was `target`, on a line between evaluations; None if it never was."""
        if self.points[0].auc >= target:
            return self.points[0].seconds
        for before, after in pairwise(self.points):
            if after.auc >= target:
                share = (target - before.auc) / (after.auc - before.auc)
                return before.seconds + share * (after.seconds - before.seconds)
        return None

    def auc_at(self, samples: float) -> float:
        """Return the AUC after so many samples, on a line between evaluations."""
        for before, after in pairwise(self.points):
            if after.samples >= samples:
                return before.auc + (after.auc - before.auc) * (samples - before.samples) / (after.samples - before.samples)
        return self.points[-1].auc


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the distance between the least and the most."""
    return sum(values) / len(values), (max(values) - min(values)) / 2
