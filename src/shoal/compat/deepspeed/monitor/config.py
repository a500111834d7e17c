"""The published sections of monitors."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from shoal.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel

__all__ = ["CSVConfig", "CometConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig", "get_monitor_config"]


class TensorBoardConfig(DeepSpeedConfigModel):
    """The block `tensorboard`."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class WandbConfig(DeepSpeedConfigModel):
    """The block `wandb`."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CSVConfig(DeepSpeedConfigModel):
    """The block `csv_monitor`."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CometConfig(DeepSpeedConfigModel):
    """The block `comet`."""

    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """All monitors; `enabled` is true if one of them is."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    comet: CometConfig = CometConfig()
    wandb: WandbConfig = WandbConfig()
    csv_monitor: CSVConfig = CSVConfig()

    @model_validator(mode="after")
    def check_enabled(self) -> DeepSpeedMonitorConfig:
        """Add `enabled`."""
        vars(self)["enabled"] = (self.tensorboard.enabled or self.wandb.enabled or self.csv_monitor.enabled
                                 or self.comet.enabled)
        return self


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the monitors of a whole configuration."""
    return DeepSpeedMonitorConfig(**{key: param_dict.get(key, {}) for key in DeepSpeedMonitorConfig.model_fields})
