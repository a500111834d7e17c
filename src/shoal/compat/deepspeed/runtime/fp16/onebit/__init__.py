"""Compressing optimizers under their published names."""

from shoal.optim.onebit import OneBitAdam as OnebitAdam
from shoal.optim.onebit import ZeroOneAdam as ZeroOneAdam
from shoal.optim.onebit_lamb import OneBitLamb as OnebitLamb

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"]
