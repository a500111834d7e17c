"""The published section `timers`."""

from __future__ import annotations

from typing import Any

from shoal.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel

__all__ = ["TIMERS", "TIMERS_THROUGHPUT", "DeepSpeedThroughputTimerConfig", "get_timers_config"]

TIMERS = "timers"
TIMERS_THROUGHPUT = "throughput"


class DeepSpeedThroughputTimerConfig(DeepSpeedConfigModel):
    """The block `timers.throughput`."""

    enabled: bool = True
    synchronized: bool = True


def get_timers_config(param_dict: dict[str, Any]) -> DeepSpeedThroughputTimerConfig:
    """Return the throughput timer of a whole configuration."""
    return DeepSpeedThroughputTimerConfig(**param_dict.get(TIMERS, {}).get(TIMERS_THROUGHPUT, {}))
