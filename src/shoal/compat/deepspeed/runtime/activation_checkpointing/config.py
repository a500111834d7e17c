"""The published section `activation_checkpointing`, which `checkpointing.configure` reads."""

from __future__ import annotations

from typing import Any

from shoal.compat.deepspeed.runtime.config_utils import DeepSpeedConfigObject, get_scalar_param

__all__ = ["ACT_CHKPT", "ACT_CHKPT_DEFAULT", "DeepSpeedActivationCheckpointingConfig"]

ACT_CHKPT = "activation_checkpointing"
ACT_CHKPT_DEFAULT: dict[str, Any] = {
    "partition_activations": False, "contiguous_memory_optimization": False, "cpu_checkpointing": False,
    "number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": False}


class DeepSpeedActivationCheckpointingConfig(DeepSpeedConfigObject):
    """The block `activation_checkpointing` of the whole configuration `param_dict`."""

    def __init__(self, param_dict: dict[str, Any]):
        super().__init__()
        section = param_dict.get(ACT_CHKPT, ACT_CHKPT_DEFAULT)
        for key, default in ACT_CHKPT_DEFAULT.items():
            setattr(self, key, get_scalar_param(section, key, default))
