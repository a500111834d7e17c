"""The published optimizer of bf16 training."""

from shoal.compat.optimizers import BF16_Optimizer as BF16_Optimizer
