"""Lion under the published name of the host kernel."""

from __future__ import annotations

from typing import Any

from shoal.compat.wide_state import keep_wide_state
from shoal.optim.lion import Lion

__all__ = ["DeepSpeedCPULion"]


class DeepSpeedCPULion(Lion):
    """Lion. In an engine it steps in native code, with fp32 state."""

    def __init__(self, model_params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 weight_decay: float = 0, fp32_optimizer_states: bool = True):
        super().__init__(model_params, lr, (betas[0], betas[1]), weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states
        if fp32_optimizer_states:
            keep_wide_state(self)
