"""The link from weights to their fp32 copies."""

from shoal.compat.unsupported import unsupported_function

_INSTEAD = "read masters and moments by deepspeed.utils.safe_get_full_fp32_param and safe_get_full_optimizer_state"
lazy_init_hp_params_optimizer_state = unsupported_function("lazy_init_hp_params_optimizer_state", _INSTEAD)
link_hp_params = unsupported_function("link_hp_params", _INSTEAD)
