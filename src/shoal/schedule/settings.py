"""The settings of the learning-rate schedule that `initialize` builds by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from shoal.config.section import Conflict, Section, Text

__all__ = ["ScheduleSettings"]


class ScheduleSettings(Section):
    """The schedule that `initialize` builds if the caller passes none; it steps once per applied optimizer step."""

    type: Text | None = None
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest, another registered name, or a class of
    `torch.optim.lr_scheduler`."""

    params: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    """Keywords of the schedule's constructor."""

    def conflicts(self) -> Iterable[Conflict]:
        if self.type is None and self.params:
            yield Conflict(keys=("type", "params"), message="missing beside params; name a schedule such as 'WarmupLR'")
