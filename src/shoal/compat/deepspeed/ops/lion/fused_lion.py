"""Lion under the published name of the fused kernel."""

from __future__ import annotations

from typing import Any

from shoal.optim.lion import Lion

__all__ = ["FusedLion"]


class FusedLion(Lion):
    """Lion. In an engine it steps in native code."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
                 set_grad_none: bool = True):
        super().__init__(params, lr, (betas[0], betas[1]), weight_decay)
        self.set_grad_none = set_grad_none
