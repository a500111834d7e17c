"""ZeRO under its published names."""

from shoal.compat.lazy import lazy_names

_HERE = __name__
_SHARDING = "shoal.compat.sharding"

__getattr__, __dir__ = lazy_names(_HERE, {
    "DeepSpeedTensorOverride": _SHARDING,
    "DeepSpeedZeRoOffload": f"{_HERE}.parameter_offload",
    "GatheredParameters": _SHARDING,
    "MiCS_Init": f"{_HERE}.mics",
    "Init": _SHARDING,
    "TiledLinear": f"{_HERE}.tiling",
    "TiledLinearReturnBias": f"{_HERE}.tiling",
    "ZeroParamStatus": "shoal.compat.parameters",
    "ZeroParamType": "shoal.compat.parameters",
    "register_external_parameter": _SHARDING,
    "unregister_external_parameter": _SHARDING,
    "unwrap_model_for_generation": f"{_HERE}.stage3",
    **{f"estimate_zero{stage}_model_states_mem_needs_all_{kind}": "shoal.zero" for stage in (2, 3) for kind in (
        "cold", "live")},
})
