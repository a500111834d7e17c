"""Events in Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from shoal.compat.deepspeed.monitor.utils import check_wandb_availability
from shoal.compat.monitoring import Event, Monitor

__all__ = ["WandbMonitor"]


class WandbMonitor(Monitor):
    """Logs events to one run. Raises ModuleNotFoundError without the package wandb."""

    def __init__(self, wandb_config: Any):
        super().__init__(wandb_config)
        check_wandb_availability()
        self.enabled: bool = wandb_config.enabled
        self.group, self.team, self.project = wandb_config.group, wandb_config.team, wandb_config.project
        self._wandb: Any = import_module("wandb")
        if self.enabled:
            self._wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> Any:
        """Log values of one step."""
        return self._wandb.log(data, step=step, commit=commit) if self.enabled else None

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Log one value for each event."""
        for tag, value, step in event_list:
            self.log({tag: value}, step=step)
