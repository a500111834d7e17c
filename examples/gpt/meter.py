"""What a training step costs, measured where it runs: tokens a second, the share of the peak, bytes, time left.

The peak is what one rank reaches on a large matrix product while every other rank of the machine does the same.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from dataclasses import dataclass

import torch

MATRIX = {"cpu": 1024, "cuda": 8192}
"""Sides of the square matrices whose product measures the peak: about 10 ms each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One finished step as rank 0 sees it; `loss` is the mean over ranks, `memory` the most that any rank holds."""

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


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Measure the floating-point operations a second of a matrix product, or return None where nobody knows how."""
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
