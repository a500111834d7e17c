"""LAMB under the published name of the fused kernel."""

from __future__ import annotations

from typing import Any

from shoal.errors import UsageError
from shoal.optim.lamb import Lamb

__all__ = ["FusedLamb"]


class FusedLamb(Lamb):
    """LAMB; `lamb_coeffs` holds the trust ratios of the last step. Raises `RuntimeError` for `amsgrad`."""

    def __init__(self, params: Any, lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
                 weight_decay: float = 0.0, max_grad_norm: float = 0.0, max_coeff: float = 10.0, min_coeff: float = 0.01,
                 amsgrad: bool = False):
        if amsgrad:
            raise UsageError("FusedLamb: got amsgrad=True; LAMB has no such variant: leave it out")
        super().__init__(params, lr, bias_correction, (betas[0], betas[1]), eps, eps_inside_sqrt, weight_decay,
                         max_grad_norm, max_coeff, min_coeff)
