"""The published optimizer of 16-bit training with Adam."""

from shoal.compat.optimizers import FP16_Optimizer as FP16_Optimizer
