"""Compressing optimizers under their published names."""

from shoal.compat.deepspeed.runtime.fp16.onebit.adam import OnebitAdam as OnebitAdam
from shoal.compat.deepspeed.runtime.fp16.onebit.lamb import OnebitLamb as OnebitLamb
from shoal.compat.deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam as ZeroOneAdam

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"]
