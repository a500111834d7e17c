"""The mean over ranks is a sum and a division, and the division has a place: before the sum, after it, or on both sides.

    prescale              before     after
    true                  mean       1            no sum is larger than the largest addend: nothing overflows
    false                 1          mean         no addend is smaller than it was: nothing underflows
    null, fp32 or wider   mean       1            in the copy that collects a gradient, where it is free
    null, 16 bits         1          mean         after the sum, which gloo takes in fp32; but
                          mean       1            where the sum is taken in the 16 bits, as by NCCL: it might overflow there
    predivide f           1 / f      f mean       a part of the division on each side

The factors are the whole difference: powers of two give the same bits wherever they stand, unless something overflows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Averaging", "Factors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What every addend of a sum is multiplied by, and what the sum is."""

    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """Where the mean over ranks is divided."""

    prescale: bool | None = None
    """All of it before the sum, or none; None: wherever it costs nothing and loses nothing."""
    predivide: float | None = None
    """The part of the division that is done before the sum; None: none, or all of it."""
    wide: bool = True
    """Whether sums of 16-bit addends are taken in fp32."""
    times: int = 1
    """What the mean is multiplied by: the number of data ranks makes a sum of it."""

    def is_before(self, *, accumulate: torch.dtype, wire: torch.dtype) -> bool:
        """Whether the whole division is done before the sum of gradients that rest and travel in these dtypes."""
        if self.prescale is not None or self.predivide is not None:
            return self.prescale is True
        if wire.itemsize < torch.float32.itemsize:
            return not self.wide
        return accumulate == wire

    def factors(self, addends: int, *, accumulate: torch.dtype, wire: torch.dtype) -> Factors:
        """Return the factors of the mean of `addends` that rest and travel in these dtypes."""
        mean = self.times / addends
        if self.is_before(accumulate=accumulate, wire=wire):
            return Factors(before=mean, after=1.0)
        part = self.predivide or 1.0
        return Factors(before=1 / part, after=part * mean)
