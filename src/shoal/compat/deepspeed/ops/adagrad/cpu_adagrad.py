"""Adagrad under the published name of the host kernel."""

from __future__ import annotations

from typing import Any

from torch.optim import Adagrad

from shoal.compat.wide_state import keep_wide_state
from shoal.errors import UsageError

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(Adagrad):
    """Adagrad. In an engine it steps in native code, with fp32 state. Raises `RuntimeError` for `amsgrad`."""

    def __init__(self, model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0,
                 amsgrad: bool = False, fp32_optimizer_states: bool = True):
        if amsgrad:
            raise UsageError("DeepSpeedCPUAdagrad: got amsgrad=True; Adagrad has no such variant: leave it out")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states
        if fp32_optimizer_states:
            keep_wide_state(self)
