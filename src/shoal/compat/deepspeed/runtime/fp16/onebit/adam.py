"""The published name of a compressing optimizer."""

from shoal.optim.onebit import OneBitAdam as OnebitAdam

__all__ = ["OnebitAdam"]
