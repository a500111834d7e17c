"""What decides whether a step is taken, how far it goes, and in what pieces."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from shoal.tier.store import WRITE_AHEAD

__all__ = ["StepRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """What decides whether and how far a step goes."""

    clipping: float
    """Largest global L2 norm; 0 leaves gradients alone."""
    check_overflow: bool
    """Skip a step whose gradients hold an infinity or NaN."""
    unused: bool = True
    """Whether a parameter may be without gradient."""
    at_once: int = sys.maxsize
    """Elements that one call of the inner optimizer steps, or one view."""
    native: bool = False
    """Step in one pass over memory where native code can."""
    ahead: int = 1
    """Pieces of state that are fetched while one is stepped."""
    behind: int = 2
    """Pieces that may still be on their way back meanwhile."""
    in_backward: bool = False
    """Step a unit while backward goes on with others, as soon as its gradient is there."""
    waiting: int = WRITE_AHEAD
    """Bytes of such units that may be in memory at once."""

    @property
    def measures(self) -> bool:
        """Whether a step needs the norm of all gradients."""
        return self.clipping > 0 or self.check_overflow
