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
from shoal.compat.unsupported import unsupported_class, unsupported_function

_INSTEAD = "read and write masters, gradients and moments by safe_get_full_* and safe_set_full_*, or their local forms"
tensor_fragment = unsupported_class("tensor_fragment", _INSTEAD)
get_full_hp_grad = unsupported_function("get_full_hp_grad", _INSTEAD)
get_full_hp_param = unsupported_function("get_full_hp_param", _INSTEAD)
get_hp_fragment_mapping = unsupported_function("get_hp_fragment_mapping", _INSTEAD)
map_to_flat_opt_states = unsupported_function("map_to_flat_opt_states", _INSTEAD)
set_full_hp_grad = unsupported_function("set_full_hp_grad", _INSTEAD)
set_full_hp_param = unsupported_function("set_full_hp_param", _INSTEAD)


@dataclass
class fragment_address:
    """Where a rank's part of a parameter lies in its flat buffer; checkpoints hold such objects."""

    numel: int
    start: int
