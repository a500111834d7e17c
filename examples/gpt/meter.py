"""Measure a training step: tokens per second, model FLOPs utilisation, bytes sent, time left.

The peak is what one rank reaches on a large matrix product while every other rank of the machine does the same.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal import Engine

MATRIX = {"cpu": 1024, "cuda": 8192}
"""Sides of the square matrices whose product measures the peak: about 10 ms each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One finished step: `loss` is the mean over ranks, `memory` the most that a rank holds, in bytes."""

    step: int
    steps: int
    loss: float
    gradient_norm: float | None
    learning_rate: float
    loss_scale: float
    tokens_per_second: float
    utilisation: float | None
    memory: int
    seconds_left: float
    stop: bool = False
    """Some rank has been asked to stop."""

    @property
    def bits(self) -> float:
        """The loss in bits per byte."""
        return self.loss / math.log(2)


class Meter:
    """Reads an engine after each of its steps, up to step `steps`; every rank reads, for ranks exchange what they know.

    `tokens` are the tokens of a step over all ranks, `flops` the floating-point operations of one token.
    """

    def __init__(self, engine: Engine, *, steps: int, tokens: int, flops: float) -> None:
        self.engine = engine
        self.steps = steps
        self.tokens = tokens
        self.flops = flops
        self.peak = peak_flops(engine.device, next(engine.module.parameters()).dtype)
        self.pace = Pace()

    def read(self, loss: Tensor, *, stop: bool = False) -> Reading:
        """Describe the step just taken, given this rank's loss and whether this rank was asked to stop."""
        losses, held, stops = self._from_all_ranks(loss.item(), memory(self.engine.device), stop)
        seconds = self.pace.tick()
        per_second = self.tokens / seconds
        norm = self.engine.get_global_grad_norm()
        return Reading(
            step=self.engine.global_steps, steps=self.steps, loss=sum(losses) / len(losses),
            gradient_norm=None if norm is None else float(norm), learning_rate=self.engine.get_lr()[0],
            loss_scale=float(self.engine.loss_scale()), tokens_per_second=per_second,
            utilisation=self.peak and self.flops * per_second / (self.peak * self.engine.world_size),
            memory=int(max(held)), seconds_left=seconds * (self.steps - self.engine.global_steps), stop=any(stops))

    def _from_all_ranks(self, *facts: float) -> list[list[float]]:
        mine = torch.tensor(facts, dtype=torch.float64, device=self.engine.device)
        theirs = [torch.empty_like(mine) for _ in range(self.engine.world_size)]
        dist.all_gather(theirs, mine)
        return torch.stack(theirs).T.tolist()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Measure the floating-point operations a second of a matrix product, or return None where the device is unknown."""
    if device.type not in MATRIX:
        return None
    side = MATRIX[device.type]
    matrix = torch.randn(side, side, device=device).to(dtype)
    best = float("inf")
    for _ in range(9):
        _finish(device)
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        _finish(device)
        best = min(best, time.perf_counter() - start)
    return 2 * side ** 3 / best


def memory(device: torch.device) -> int:
    """Return the bytes that this process holds now: of the device, or resident where the device is the processor."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _resident("VmRSS:")


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has held at one time."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _resident("VmHWM:")


class Pace:
    """Times the last `window` steps: a rate that follows changes but does not flicker."""

    def __init__(self, window: int = 20) -> None:
        self.marks: deque[float] = deque([time.perf_counter()], maxlen=window + 1)

    def tick(self) -> float:
        """Note that a step has ended and return the seconds per step."""
        self.marks.append(time.perf_counter())
        return (self.marks[-1] - self.marks[0]) / (len(self.marks) - 1)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _resident(field: str) -> int:
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
    except FileNotFoundError:  # no /proc: the peak is what the system tells, in KiB but for macOS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
