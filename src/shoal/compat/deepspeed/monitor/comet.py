"""Events in Comet."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from shoal.compat.deepspeed.monitor.utils import check_comet_availability
from shoal.compat.monitoring import Event, Monitor

__all__ = ["CometMonitor", "EventsLogScheduler"]


class EventsLogScheduler:
    """Says of each tag when its next event is due: at most one in `samples_log_interval` samples."""

    def __init__(self, samples_log_interval: int):
        self.samples_log_interval = samples_log_interval
        self._last: dict[str, int] = {}

    def needs_logging(self, name: str, current_sample: int) -> bool:
        """Whether an event of this tag is due, which then counts as logged."""
        last = self._last.get(name)
        due = last is None or current_sample - last >= self.samples_log_interval
        if due:
            self._last[name] = current_sample
        return due


class CometMonitor(Monitor):
    """Logs events to one experiment. Raises ModuleNotFoundError without the package comet_ml."""

    def __init__(self, comet_config: Any):
        super().__init__(comet_config)
        check_comet_availability()
        self.enabled: bool = comet_config.enabled
        self.samples_log_interval: int = comet_config.samples_log_interval
        self._scheduler = EventsLogScheduler(self.samples_log_interval)
        self.experiment = _start(comet_config) if self.enabled else None

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Log the events that are due."""
        if self.experiment is not None:
            for tag, value, step in event_list:
                if self._scheduler.needs_logging(tag, step):
                    self.experiment.log_metric(name=tag, value=value, step=step)


def _start(config: Any) -> Any:
    names = {"project": "project_name", "workspace": "workspace", "api_key": "api_key", "online": "online",
             "experiment_key": "experiment_key", "mode": "mode"}
    given = {ours: getattr(config, theirs) for theirs, ours in names.items()}
    experiment = import_module("comet_ml").start(**{key: value for key, value in given.items() if value is not None})
    if config.experiment_name is not None:
        experiment.set_name(config.experiment_name)
    return experiment
