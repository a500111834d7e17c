"""Lion under its published names."""

from shoal.compat.deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion as DeepSpeedCPULion
from shoal.compat.deepspeed.ops.lion.fused_lion import FusedLion as FusedLion
