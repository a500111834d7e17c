"""1-bit LAMB under its published name."""

from __future__ import annotations

from typing import Any

from shoal.compat.deepspeed.runtime.fp16.onebit.constructor import check_unused
from shoal.optim.onebit_lamb import OneBitLamb

__all__ = ["OnebitLamb"]


class OnebitLamb(OneBitLamb):
    """1-bit LAMB; gradients are compressed by the engine that steps it, so `deepspeed` is not needed.

    Raises `RuntimeError` for `amsgrad`, `ValueError` for `max_grad_norm`.
    """

    def __init__(self, params: Any, deepspeed: Any = None, lr: float = 1e-3, freeze_step: int = 100_000,
                 bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_grad_norm: float = 0.0,
                 max_coeff: float = 10.0, min_coeff: float = 0.01, amsgrad: bool = False, cuda_aware: bool = False,
                 comm_backend_name: str = "nccl", coeff_beta: float = 0.9, factor_max: float = 4.0,
                 factor_min: float = 0.5, factor_threshold: float = 0.1):
        check_unused("OnebitLamb", amsgrad, max_grad_norm, cuda_aware, comm_backend_name)
        super().__init__(params, lr, freeze_step, bias_correction, (betas[0], betas[1]), eps, eps_inside_sqrt, weight_decay,
                         max_coeff, min_coeff, coeff_beta=coeff_beta, factor_max=factor_max, factor_min=factor_min,
                         factor_threshold=factor_threshold)
