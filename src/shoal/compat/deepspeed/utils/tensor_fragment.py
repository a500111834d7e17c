"""The state of parameters under its published names."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.compat.parameters import safe_get_full_fp32_param as safe_get_full_fp32_param
from shoal.compat.parameters import safe_get_full_grad as safe_get_full_grad
from shoal.compat.parameters import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from shoal.compat.parameters import safe_get_local_fp32_param as safe_get_local_fp32_param
from shoal.compat.parameters import safe_get_local_grad as safe_get_local_grad
from shoal.compat.parameters import safe_get_local_optimizer_state as safe_get_local_optimizer_state
from shoal.compat.parameters import safe_set_full_fp32_param as safe_set_full_fp32_param
from shoal.compat.parameters import safe_set_full_grad as safe_set_full_grad
from shoal.compat.parameters import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from shoal.compat.parameters import safe_set_local_fp32_param as safe_set_local_fp32_param
from shoal.compat.parameters import safe_set_local_grad as safe_set_local_grad
from shoal.compat.parameters import safe_set_local_optimizer_state as safe_set_local_optimizer_state
from shoal.compat.parameters import safe_update_full_grad_vectorized as safe_update_full_grad_vectorized


@dataclass
class fragment_address:
    """Where a rank's part of a parameter lies in its flat buffer; checkpoints hold such objects."""

    numel: int
    start: int
