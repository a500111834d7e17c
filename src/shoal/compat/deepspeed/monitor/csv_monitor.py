"""Events in CSV files, one for each tag."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.compat.monitoring import Event, Monitor

__all__ = ["csvMonitor"]


class csvMonitor(Monitor):
    """Appends each event to `output_path/job_name/TAG.csv`, whose columns are the step and the value."""

    def __init__(self, csv_config: Any):
        super().__init__(csv_config)
        self.filenames: list[str] = []
        self.enabled: bool = csv_config.enabled
        self.output_path: str = csv_config.output_path
        self.job_name: str = csv_config.job_name
        self.log_dir = Path(self.output_path or "csv_monitor") / self.job_name
        if self.enabled:
            self.log_dir.mkdir(parents=True, exist_ok=True)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Append one line for each event."""
        for tag, value, step in event_list if self.enabled else ():
            path = self.log_dir / f"{tag.replace('/', '_')}.csv"
            is_new = not path.exists()
            if str(path) not in self.filenames:
                self.filenames.append(str(path))
            with path.open("a", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                if is_new:
                    writer.writerow(["step", tag.rpartition("/")[2]])
                writer.writerow([step, value.item() if isinstance(value, Tensor) else value])
