"""Learning-rate schedules: pure functions of the step, by name or by class."""

from __future__ import annotations

from shoal.schedule.base import Schedule
from shoal.schedule.registry import AnySchedule, make_schedule, register_schedule
from shoal.schedule.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "AnySchedule",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "make_schedule",
    "register_schedule",
]
