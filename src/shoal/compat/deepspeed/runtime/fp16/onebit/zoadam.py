"""The published name of a compressing optimizer."""

from shoal.optim.onebit import ZeroOneAdam as ZeroOneAdam

__all__ = ["ZeroOneAdam"]
