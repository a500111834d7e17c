"""Progressive layer dropping: the share of layers that a step keeps, theta(t) = (1 - theta) exp(-gamma t) + theta.

(Zhang and He 2020, equation 5.) A model that drops layers reads `pld_theta` of the keyword arguments of its forward.
"""

from __future__ import annotations

import math

__all__ = ["ProgressiveLayerDrop"]


class ProgressiveLayerDrop:
    """The schedule of theta: 1 at first, `theta` in the end."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001):
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0

    def get_state(self) -> dict[str, bool | float]:
        """Return the keyword arguments for forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """Return theta at the present step."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Move to a step."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta
