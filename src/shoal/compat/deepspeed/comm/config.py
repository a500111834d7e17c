"""The published section `comms_logger`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shoal.compat.deepspeed.comm.constants import *  # noqa: F403
from shoal.compat.deepspeed.comm.constants import COMMS_LOGGER
from shoal.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel


class CommsLoggerConfig(DeepSpeedConfigModel):
    """The block `comms_logger`."""

    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[str] = Field(default_factory=list)
    verbose: bool = False
    debug: bool = False


class DeepSpeedCommsConfig:
    """The log of collectives of a whole configuration; the block alone switches it on."""

    def __init__(self, ds_config: dict[str, Any]):
        self.comms_logger_enabled = COMMS_LOGGER in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**ds_config[COMMS_LOGGER])
