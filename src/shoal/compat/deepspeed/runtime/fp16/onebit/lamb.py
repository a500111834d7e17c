"""The published name of a compressing optimizer."""

from shoal.optim.onebit_lamb import OneBitLamb as OnebitLamb

__all__ = ["OnebitLamb"]
