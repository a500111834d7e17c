"""Learning-rate schedules: pure functions of the step, by name or by class."""

from __future__ import annotations

from shoal.schedule.arguments import add_tuning_arguments, get_config_from_args
from shoal.schedule.base import Schedule
from shoal.schedule.cycle import OneCycle
from shoal.schedule.range_test import LRRangeTest
from shoal.schedule.registry import AnySchedule, make_schedule, register_schedule
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
