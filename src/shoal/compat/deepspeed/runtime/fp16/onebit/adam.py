"""1-bit Adam under its published name."""

from __future__ import annotations

from typing import Any

from shoal.compat.deepspeed.runtime.fp16.onebit.constructor import check_unused
from shoal.optim.onebit import OneBitAdam

__all__ = ["OnebitAdam"]


class OnebitAdam(OneBitAdam):
    """1-bit Adam; gradients are compressed by the engine that steps it, so `deepspeed` is not needed.

    Raises `RuntimeError` for `amsgrad`, `ValueError` for `max_grad_norm`.
    """

    def __init__(self, params: Any, deepspeed: Any = None, lr: float = 1e-3, freeze_step: int = 100_000,
                 bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_grad_norm: float = 0.0,
                 amsgrad: bool = False, cuda_aware: bool = False, comm_backend_name: str = "nccl"):
        check_unused("OnebitAdam", amsgrad, max_grad_norm, cuda_aware, comm_backend_name)
        super().__init__(params, lr, freeze_step, bias_correction, (betas[0], betas[1]), eps, eps_inside_sqrt, weight_decay)
