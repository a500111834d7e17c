"""Timers under their published names: wall-clock time of named phases, with the device's work done at both ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from shoal.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shoal.compat.deepspeed.utils.logging import log_dist, logger

__all__ = ["BACKWARD_GLOBAL_TIMER", "BACKWARD_INNER_GLOBAL_TIMER", "BACKWARD_INNER_MICRO_TIMER", "BACKWARD_MICRO_TIMER",
           "BACKWARD_REDUCE_GLOBAL_TIMER", "BACKWARD_REDUCE_MICRO_TIMER", "FORWARD_GLOBAL_TIMER", "FORWARD_MICRO_TIMER",
           "STEP_GLOBAL_TIMER", "STEP_MICRO_TIMER", "NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer",
           "trim_mean"]

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"
GIB = 1 << 30


class SynchronizedWallClockTimer:
    """Timers by name: `timers("fwd").start()`."""

    class Timer:
        """One phase; times are milliseconds."""

        def __init__(self, name: str):
            self.name_ = name
            self.started_ = False
            self.start_time = 0.0
            self.records: list[float] = []

        def start(self) -> None:
            """Begin the phase."""
            assert not self.started_, f"timer '{self.name_}' was started already"
            get_accelerator().synchronize()
            self.start_time = time.perf_counter()
            self.started_ = True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """End the phase."""
            assert self.started_, f"timer '{self.name_}' was not started"
            get_accelerator().synchronize()
            self.records.append((time.perf_counter() - self.start_time) * 1000)
            self.started_ = False

        def reset(self) -> None:
            """Forget what was measured."""
            self.started_, self.records = False, []

        def elapsed(self, reset: bool = True) -> float:
            """Return the sum of the phases, and forget them if `reset`; a running phase goes on."""
            running = self.started_
            if running:
                self.stop()
            total = sum(self.records)
            if reset:
                self.reset()
            if running:
                self.start()
            return total

        def mean(self) -> float:
            """Return the mean of the phases without the longest and the shortest tenth."""
            self.elapsed(reset=False)
            return trim_mean(self.records, 0.1)

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def get_timers(self) -> dict[str, SynchronizedWallClockTimer.Timer]:
        """Return the timers by name."""
        return self.timers

    def __call__(self, name: str) -> SynchronizedWallClockTimer.Timer:
        return self.timers.setdefault(name, self.Timer(name))

    @staticmethod
    def memory_usage() -> str:
        """Return a line of the memory in use."""
        device = get_accelerator()
        return (f" | mem_allocated: {device.memory_allocated() / GIB:.4f} GB"
                f" | max_mem_allocated: {device.max_memory_allocated() / GIB:.4f} GB")

    def log(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False,
            ranks: Sequence[int] | None = None) -> None:
        """Log the times of these timers, divided by `normalizer`, on rank 0 or on `ranks`."""
        assert normalizer > 0.0
        times = [f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}"
                 for name in names if name in self.timers]
        log_dist(f"time (ms) | {' | '.join(times)}{self.memory_usage() if memory_breakdown else ''}", ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the means of these timers, divided by `normalizer`."""
        assert normalizer > 0.0
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in means if reset else ():
            self.timers[name].reset()
        return means


class NoopTimer:
    """Timers that measure nothing."""

    class Timer:
        """A phase that is not measured."""

        def start(self) -> None:
            """Do nothing."""

        def stop(self, **kwargs: Any) -> None:
            """Do nothing."""

        def reset(self) -> None:
            """Do nothing."""

        def elapsed(self, **kwargs: Any) -> float:
            """Return 0."""
            return 0

        def mean(self) -> float:
            """Return 0."""
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        """Return no timers."""
        return {}

    def log(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False,
            ranks: Sequence[int] | None = None) -> None:
        """Do nothing."""

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Do nothing."""


class ThroughputTimer:
    """Samples per second: `start` before each microbatch, `stop` after it, `global_step` at the last one of a step.

    The first `start_step` steps are not counted. Every `steps_per_output` steps a line is logged.
    """

    def __init__(self, config: Any, batch_size: int | None, start_step: int = 2, steps_per_output: int | None = None,
                 monitor_memory: bool = False, logging_fn: Callable[[str], object] | None = None):
        self.config = config
        self.batch_size = 1 if batch_size is None else batch_size
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or logger.info
        self.start_time = self.end_time = 0.0
        self.started = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.initialized = True

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a microbatch."""
        if not self.config.enabled:
            return
        self.started = True
        if self.global_step_count >= self.start_step:
            self._synchronize()
            self.start_time = time.time()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a microbatch, and with `global_step` a step."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.start_time > 0:
            self._synchronize()
            self.end_time = time.time()
            self.total_elapsed_time += self.end_time - self.start_time
            self.step_elapsed_time += self.end_time - self.start_time
            if global_step:
                self._report(report_speed)
                self.step_elapsed_time = 0.0

    def _synchronize(self) -> None:
        if self.config.synchronized:
            get_accelerator().synchronize()

    def _report(self, wanted: bool) -> None:
        every = self.steps_per_output
        if wanted and every and self.global_step_count % every == 0:
            device = get_accelerator()
            self.logging(f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/"
                         f"global_step={self.global_step_count}, "
                         f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
                         f"CurrSamplesPerSec={self.batch_size / (self.step_elapsed_time + 1e-6)}, "
                         f"MemAllocated={device.memory_allocated() / GIB:.2f}GB, "
                         f"MaxMemAllocated={device.max_memory_allocated() / GIB:.2f}GB")

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of the steps so far; minus infinity before any is counted."""
        steps, seconds = self.global_step_count - self.start_step, self.total_elapsed_time
        return self.batch_size * steps / seconds if steps > 0 and seconds else float("-inf")


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean of `data` without the largest and the smallest part of it; 0 of nothing."""
    assert 0.0 <= trim_percent <= 1.0
    if not data:
        return 0
    cut = int(len(data) * trim_percent)
    kept = sorted(data)[cut:len(data) - cut] if len(data) > 2 * cut else sorted(data)
    return fmean(kept)
