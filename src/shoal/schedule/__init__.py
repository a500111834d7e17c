"""Learning-rate schedules: pure functions of the step, selected by name or passed as a class."""

from __future__ import annotations

from shoal.schedule.base import Schedule
from shoal.schedule.cycle import LRRangeTest, OneCycle
from shoal.schedule.registry import (
    AnySchedule,
    add_tuning_arguments,
    get_config_from_args,
    make_schedule,
    register_schedule,
)
from shoal.schedule.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "AnySchedule",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "make_schedule",
    "register_schedule",
]
