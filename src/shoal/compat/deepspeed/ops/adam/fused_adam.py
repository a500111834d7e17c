"""Adam and AdamW under the published name of the fused kernel."""

from __future__ import annotations

from typing import Any

from shoal.errors import UsageError
from shoal.optim.adam import BiasedAdam

__all__ = ["FusedAdam"]


class FusedAdam(BiasedAdam):
    """AdamW, or Adam with decay in the gradient where `adam_w_mode` is false. In an engine it steps in native code.

    Raises `RuntimeError` for `amsgrad`, which the published kernel lacks.
    """

    def __init__(self, params: Any, lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
                 weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True):
        if amsgrad:
            raise UsageError("FusedAdam: got amsgrad=True; use torch.optim.AdamW(amsgrad=True)")
        super().__init__(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay,
                         bias_correction=bias_correction,
                         decoupled_weight_decay=adam_w_mode)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
