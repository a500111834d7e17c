"""The training: a model whose state does not fit in memory, built and stepped like any other.

`configuration` and `build` make that possible; the rest is data, the loop and measurements.
"""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from corpus import documents
from model import VOCABULARY, Shape
from shoal.tier import Event
from timeline import Timeline
from usage import UsageProbe
from view import StepRecord, View

LAYERS = 32
"""The approximate number of blocks of a model, whose width follows from it: 128 to 1024."""

STATE = 16
"""Bytes of state per parameter: in fp32 4 of weight, 4 of gradient, 8 of moments; in bf16 2, 2, 4 of master and 8."""

DOCUMENTS = 64
"""Files of the standard library used as text: enough for a few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and how it is trained: `block` bytes a step and rank, state on the disk under `path` or (None) in memory."""

    shape: Shape
    dtype: str
    steps: int
    block: int
    path: Path | None
    seed: int = 0

    def configuration(self) -> dict[str, Any]:
        """Return the configuration; the two offload blocks are the only difference between disk and memory."""
        zero: dict[str, Any] = {"stage": 3, "stage3_prefetch_bucket_size": 1}  # one unit ahead
        if self.path is not None:
            disk = {"device": "nvme", "nvme_path": str(self.path)}
            state = disk | {"buffer_count": 4, "step_in_backward": False}  # true is faster, and takes another 100 MB
            zero |= {"offload_param": disk | {"buffer_count": 3}, "offload_optimizer": state}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": self.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "zero_optimization": zero,
        }


def shape_of(state: int) -> Shape:
    """Return the GPT whose state takes `state` bytes or a little more."""
    parameters = state / STATE
    dim = min(1024, max(128, 64 * round(math.sqrt(parameters / (12 * LAYERS)) / 64)))
    ends, block = 2 * VOCABULARY * dim + dim, 12 * dim ** 2 + 2 * dim
    return Shape(layers=max(2, math.ceil((parameters - ends) / block)), dim=dim, heads=dim // 64)


def build(case: Case) -> shoal.Engine:
    """Build the model and its engine; with a disk only a few blocks are in memory at any time."""
    torch.manual_seed(case.seed)
    config = case.configuration()
    with shoal.zero.Init(config=config, enabled=case.path is not None):
        model = case.shape.build()
    return shoal.initialize(model=model, config=config)[0]


def batches(block: int, rank: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs (1, block) of text and its shift by one byte, at random offsets of the corpus of `examples/gpt`."""
    values = text()
    source = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    while True:
        start = int(torch.randint(len(values) - block, (), generator=source))
        window = values[start:start + block + 1].long()[None]
        yield window[:, :-1], window[:, 1:]


@cache
def text() -> Tensor:
    """Return the first documents of the corpus, as bytes."""
    joined = b"".join(islice(documents(Path(sysconfig.get_path("stdlib"))), DOCUMENTS))
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def step(engine: shoal.Engine, x: Tensor, y: Tensor) -> float:
    """Take one step and return its loss, the mean over ranks."""
    loss = engine(x.to(engine.device), y.to(engine.device))
    engine.backward(loss)
    engine.step()
    dist.all_reduce(total := loss.detach().clone())
    return total.item() / engine.world_size


def train(engine: shoal.Engine, case: Case, view: View, probe: UsageProbe) -> tuple[list[StepRecord], list[Event]]:
    """Train a case; return its steps, and the events of the last one."""
    pairs = batches(case.block, engine.global_rank, case.seed)
    records: list[StepRecord] = []
    events: list[Event] = []
    for number in range(1, case.steps + 1):
        with engine.trace() as trace:
            start = time.perf_counter()
            loss = step(engine, *next(pairs))
            stop = time.perf_counter()
        events = trace.events
        records.append(StepRecord(step=number, steps=case.steps, loss=loss, usage=probe.now(),
                                timeline=Timeline.of(events, start, stop)))
        view.show(records[-1])
    return records, events
