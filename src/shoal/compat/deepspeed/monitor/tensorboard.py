"""Events in TensorBoard's files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.compat.deepspeed.monitor.utils import check_tb_availability
from shoal.compat.monitoring import Event, Monitor

__all__ = ["TensorBoardMonitor"]


class TensorBoardMonitor(Monitor):
    """Writes scalars to `output_path/job_name`. Raises ModuleNotFoundError without the package tensorboard."""

    def __init__(self, tensorboard_config: Any):
        super().__init__(tensorboard_config)
        check_tb_availability()
        self.enabled: bool = tensorboard_config.enabled
        self.output_path: str = tensorboard_config.output_path
        self.job_name: str = tensorboard_config.job_name
        self.summary_writer: Any = None
        if self.enabled:
            self.get_summary_writer()

    def get_summary_writer(self, base: str | None = None) -> Any:
        """Return the writer; without an `output_path` below `base`, by default the folder tensorboard of the home."""
        if self.enabled and self.summary_writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = Path(self.output_path or base or Path.home() / "tensorboard") / self.job_name
            folder.mkdir(parents=True, exist_ok=True)
            self.summary_writer = SummaryWriter(log_dir=str(folder))
        return self.summary_writer

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        """Write one scalar for each event."""
        if self.summary_writer is not None:
            for tag, value, step in event_list:
                self.summary_writer.add_scalar(tag, value, step)
            if flush:
                self.summary_writer.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        if self.summary_writer is not None:
            self.summary_writer.flush()
