"""The published section `activation_checkpointing`, which `checkpointing.configure` reads."""

from __future__ import annotations

from typing import Any

from shoal.compat.deepspeed.runtime.config_utils import DeepSpeedConfigObject, get_scalar_param

ACT_CHKPT = "activation_checkpointing"
ACT_CHKPT_PARTITION_ACTIVATIONS, ACT_CHKPT_PARTITION_ACTIVATIONS_DEFAULT = "partition_activations", False
ACT_CHKPT_NUMBER_CHECKPOINTS, ACT_CHKPT_NUMBER_CHECKPOINTS_DEFAULT = "number_checkpoints", None
ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION = "contiguous_memory_optimization"
ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION_DEFAULT = False
ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY = "synchronize_checkpoint_boundary"
ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY_DEFAULT = False
ACT_CHKPT_PROFILE, ACT_CHKPT_PROFILE_DEFAULT = "profile", False
ACT_CHKPT_CPU_CHECKPOINTING, ACT_CHKPT_CPU_CHECKPOINTING_DEFAULT = "cpu_checkpointing", False
ACT_CHKPT_DEFAULT: dict[str, Any] = {
    ACT_CHKPT_PARTITION_ACTIVATIONS: ACT_CHKPT_PARTITION_ACTIVATIONS_DEFAULT,
    ACT_CHKPT_NUMBER_CHECKPOINTS: ACT_CHKPT_NUMBER_CHECKPOINTS_DEFAULT,
    ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION: ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION_DEFAULT,
    ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY: ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY_DEFAULT,
    ACT_CHKPT_PROFILE: ACT_CHKPT_PROFILE_DEFAULT, ACT_CHKPT_CPU_CHECKPOINTING: ACT_CHKPT_CPU_CHECKPOINTING_DEFAULT}


class DeepSpeedActivationCheckpointingConfig(DeepSpeedConfigObject):
    """The block `activation_checkpointing` of the whole configuration `param_dict`."""

    def __init__(self, param_dict: dict[str, Any]):
        super().__init__()
        section = param_dict.get(ACT_CHKPT, ACT_CHKPT_DEFAULT)
        for key, default in ACT_CHKPT_DEFAULT.items():
            setattr(self, key, get_scalar_param(section, key, default))
