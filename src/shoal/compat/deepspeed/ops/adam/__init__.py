"""Adam under its published names."""

from shoal.compat.deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam
from shoal.compat.deepspeed.ops.adam.fused_adam import FusedAdam as FusedAdam
