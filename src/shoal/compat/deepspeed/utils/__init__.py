"""Published helpers."""

from shoal.compat.lazy import lazy_names

_HERE = __name__

__getattr__, __dir__ = lazy_names(_HERE, {
    **{name: f"{_HERE}.logging" for name in ("logger", "log_dist", "log_dist_once", "set_log_level_from_string")},
    **{f"safe_{verb}_{part}_{kind}": f"{_HERE}.tensor_fragment" for verb in ("get", "set") for part in ("full", "local")
       for kind in ("fp32_param", "grad", "optimizer_state")},
    "safe_update_full_grad_vectorized": f"{_HERE}.tensor_fragment",
    "OnDevice": f"{_HERE}.init_on_device",
    "RepeatingLoader": "shoal.data",
    "DeprecatedException": f"{_HERE}.exceptions",
    "instrument_w_nvtx": f"{_HERE}.nvtx",
    **dict.fromkeys((
        "initialize", *(f"get_{axis}_parallel_{what}" for axis in ("data", "model", "tensor_model")
                        for what in ("group", "rank", "world_size")),
        "get_tensor_model_parallel_src_rank", "set_tensor_model_parallel_rank", "set_tensor_model_parallel_world_size"),
        f"{_HERE}.groups"),
    **dict.fromkeys(("fragment_address", "get_full_hp_grad", "get_full_hp_param", "get_hp_fragment_mapping",
                     "map_to_flat_opt_states", "set_full_hp_grad", "set_full_hp_param", "tensor_fragment"),
                    f"{_HERE}.tensor_fragment"),
    **dict.fromkeys(("lazy_init_hp_params_optimizer_state", "link_hp_params"), f"{_HERE}.mixed_precision_linkage"),
    "get_numactl_cmd": f"{_HERE}.numa",
    **{name: f"{_HERE}.z3_leaf_module" for name in (
        "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter")},
})
