"""One rank of the lab: it builds the model, takes a few steps, and measures its own memory in between.

Memory is counted from the moment before the model is built, so that it is the model's and the training's, not torch's.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import torch

import shoal
from meter import memory, peak_memory
from model import PRESETS, VOCABULARY
from shoal.tier import trim
from shoal.transport.process_group import device
from shoal.zero.placement import StateBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the lab: a model on `microbatch` sequences of `block` bytes a rank, at a ZeRO stage."""

    stage: int
    model: str
    microbatch: int
    block: int
    dtype: str
    steps: int

    def config(self) -> dict[str, Any]:
        """Return the configuration, which differs from line to line in its stage alone."""
        return {
            "train_micro_batch_size_per_gpu": self.microbatch,
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": self.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Bytes of one rank: its model state after initialisation and after training, and what the process took for it."""

    parameters: int
    state_at_first: StateBytes
    state: StateBytes
    memory_at_first: int
    peak: int


def probe(case: Case) -> Finding:
    """Train `case` for a few steps on this rank and return what it took."""
    rehearse(case)
    gc.collect()  # what the rehearsal held is not to go in the middle of the measurement
    trim()
    before = memory(device())
    torch.manual_seed(0)
    engine, *_ = shoal.initialize(model=PRESETS[case.model].build(), config=case.config())
    state_at_first, memory_at_first = engine.model_state_bytes(), memory(engine.device) - before
    forget_peak(engine.device)
    train(engine, case)
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    return Finding(parameters=parameters, state_at_first=state_at_first, state=engine.model_state_bytes(),
                   memory_at_first=memory_at_first, peak=peak_memory(engine.device) - before)


def train(engine: shoal.Engine, case: Case) -> None:
    """Take the steps of `case` on random text."""
    for _ in range(case.steps):
        text = torch.randint(VOCABULARY, (case.microbatch, case.block + 1), device=engine.device)
        loss = engine(text[:, :-1], text[:, 1:])
        engine.backward(loss)
        engine.step()


def rehearse(case: Case) -> None:
    """Train the smallest model alike, so that code which torch loads on first use is there before we count."""
    small = replace(case, model="tiny", steps=1)
    engine, *_ = shoal.initialize(model=PRESETS[small.model].build(), config=small.config())
    train(engine, small)
    engine.destroy()


def forget_peak(where: torch.device) -> None:
    """Count the peak from now on: of the device, or of the process (Linux: writing 5 to /proc/self/clear_refs)."""
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
        return
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
