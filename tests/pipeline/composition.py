"""The pairs of features that compose: each pair that can be combined is one training in `test_composition.py`.

    python -m tests.pipeline.composition        writes the table into docs/composition.md

The table is generated from the list that the test trains through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One feature of a training; a training has at most one of each `kind`."""

    name: str
    kind: str
    stages: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    tensor: int = 1
    replicas: int = 1
    zero: int | None = None
    dtype: str = "fp32"
    clipping: float = 0.0
    interval: int = 0
    device: str | None = None
    tied: bool = False


FEATURES = (
    Feature(name="1F1B", kind="schedule", stages=2),
    Feature(name="interleaved", kind="schedule", stages=2, schedule="interleaved", stages_per_rank=2),
    Feature(name="ZB-H1", kind="schedule", stages=2, schedule="zb-h1"),
    Feature(name="ZB-H2", kind="schedule", stages=2, schedule="zb-h2"),
    Feature(name="ZBV", kind="schedule", stages=2, schedule="zbv", stages_per_rank=2),
    Feature(name="tensor", kind="tensor", tensor=2),
    Feature(name="replica x shard", kind="replicas", replicas=2),
    Feature(name="ZeRO 1", kind="ZeRO", zero=1),
    Feature(name="ZeRO 2", kind="ZeRO", zero=2),
    Feature(name="ZeRO 3", kind="ZeRO", zero=3),
    Feature(name="bf16", kind="dtype", dtype="bf16"),
    Feature(name="fp16", kind="dtype", dtype="fp16"),
    Feature(name="clipping", kind="clipping", clipping=0.5),
    Feature(name="recompute", kind="recompute", interval=1),
    Feature(name="state on the host", kind="tier", device="cpu"),
    Feature(name="state on disk", kind="tier", device="nvme"),
    Feature(name="tied weights", kind="tied", tied=True),
)


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Yield every pair of features that one training can have."""
    return ((one, other) for one, other in combinations(FEATURES, 2) if one.kind != other.kind)


def settings(one: Feature, other: Feature, folder: str) -> dict[str, Any]:
    """Return the keyword arguments of a case with both features; all accumulate over four microbatches."""
    pair = (one, other)
    zero = max((each.zero for each in pair if each.zero is not None), default=1 if one.replicas * other.replicas > 1 else 0)
    place: dict[str, Any] = {}
    for each in pair:
        if each.device is not None:
            place = {"device": each.device, **({"nvme_path": folder} if each.device == "nvme" else {})}
    state = {"offload_optimizer": place, "offload_param": place} if place else {}
    replicas = one.replicas * other.replicas
    mesh = {"mesh": {"replica": replicas}} if replicas > 1 else {}
    pipelined = one if one.kind == "schedule" else other
    return {"stages": pipelined.stages, "schedule": pipelined.schedule, "stages_per_rank": pipelined.stages_per_rank,
            "tensor": one.tensor * other.tensor, "zero": zero, "dtype": one.dtype if one.kind == "dtype" else other.dtype,
            "clipping": max(one.clipping, other.clipping), "interval": max(one.interval, other.interval),
            "tied": one.tied or other.tied, "replicas": replicas,
            "config": {"zero_optimization": {"stage": zero, **state}, **mesh}}


def table() -> str:
    """Return the page."""
    known = {frozenset(pair) for pair in pairs()}
    head = ["", *(feature.name for feature in FEATURES)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one in FEATURES:
        cells = ["yes" if frozenset((one, other)) in known else "" for other in FEATURES]
        lines.append("| " + " | ".join([f"**{one.name}**", *cells]) + " |")
    return "\n".join([
        "# Which features compose", "",
        "Each yes is a training that `tests/pipeline/test_composition.py` runs, with two ranks along every axis it has and",
        "four microbatches a step. The test compares its losses and weights with plain PyTorch in one process: in fp32",
        "they agree within rounding. A cell is empty where a training has only one of the two, for example one schedule.",
        "`tests/pipeline/test_three_dimensions.py` and `make fuzz` train with more than two features at once.",
        "`tests/sequence_parallel/test_training.py` does the same for a sequence axis of two and four ranks, and",
        "`tests/activation` for the places where saved tensors rest.", "",
        *lines, "",
        "This page is written by `python -m tests.pipeline.composition` from the list that the test trains through.", ""])


if __name__ == "__main__":
    PAGE.write_text(table())
