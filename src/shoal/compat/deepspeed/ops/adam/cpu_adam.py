"""Adam and AdamW under the published name of the host kernel."""

from __future__ import annotations

from typing import Any

from shoal.compat.wide_state import keep_wide_state
from shoal.optim.adam import BiasedAdam

__all__ = ["DeepSpeedCPUAdam"]


class DeepSpeedCPUAdam(BiasedAdam):
    """AdamW, or Adam with decay in the gradient where `adamw_mode` is false. In an engine it steps in native code.

    In an engine the state is fp32 in any case. Raises `ConfigError` for `amsgrad` without `bias_correction`.
    """

    def __init__(self, model_params: Any, lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0,
                 amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True):
        super().__init__(model_params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay,
                         amsgrad=amsgrad, bias_correction=bias_correction,
                         decoupled_weight_decay=adamw_mode)
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states
        if fp32_optimizer_states:
            keep_wide_state(self)
