"""The published monitors together: what is enabled is written by rank 0 of the job."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from shoal.compat.deepspeed.monitor.comet import CometMonitor
from shoal.compat.deepspeed.monitor.config import DeepSpeedMonitorConfig
from shoal.compat.deepspeed.monitor.csv_monitor import csvMonitor
from shoal.compat.deepspeed.monitor.tensorboard import TensorBoardMonitor
from shoal.compat.deepspeed.monitor.wandb import WandbMonitor
from shoal.compat.monitoring import Event, Monitor

__all__ = ["CometMonitor", "Event", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]


class MonitorMaster(Monitor):
    """Writes events to every monitor that is enabled; `enabled` is true if there is one. Other ranks write nothing."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig):
        super().__init__(monitor_config)
        self.tb_monitor: Monitor | None = None
        self.wandb_monitor: Monitor | None = None
        self.csv_monitor: Monitor | None = None
        self.comet_monitor: Monitor | None = None
        self.enabled: bool = vars(monitor_config)["enabled"]
        if self.enabled and (not dist.is_initialized() or dist.get_rank() == 0):
            self._open()

    def _open(self) -> None:
        config = self.monitor_config
        if config.tensorboard.enabled:
            self.tb_monitor = TensorBoardMonitor(config.tensorboard)
        if config.wandb.enabled:
            self.wandb_monitor = WandbMonitor(config.wandb)
        if config.csv_monitor.enabled:
            self.csv_monitor = csvMonitor(config.csv_monitor)
        if config.comet.enabled:
            self.comet_monitor = CometMonitor(config.comet)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write events to every monitor of this rank."""
        events = list(event_list)
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor):
            if monitor is not None:
                monitor.write_events(events)
