"""The published optimizer of 16-bit training with other optimizers than Adam."""

from shoal.compat.optimizers import FP16_UnfusedOptimizer as FP16_UnfusedOptimizer
