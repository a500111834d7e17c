"""DeepSpeed's published package, bound to Shoal.

The files below have the paths of the published modules, so `import deepspeed.runtime.zero.config` is this folder's
`runtime/zero/config.py`. They are of two kinds:

- A module of published names alone: `runtime/zero/config.py` declares the published classes, and converts them.
- A module that binds: `from shoal.compat.engine import DeepSpeedEngine as DeepSpeedEngine`.

Logic that more than one module needs lies beside this folder, in `shoal/compat`: `entry.py` (initialize), `engine.py` (the
engines), `optimizers.py`, `tolerance.py` (configuration), `parameters.py` (`ds_id` and `safe_get_*`). Names are imported
at their first use (`lazy.py`).
"""

from shoal.compat.lazy import lazy_names

__version__ = version = "0.19.8+shoal"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = git_hash = None
__git_branch__ = git_branch = None
HAS_TRITON = False

_HERE = __name__

_LOGGING = f"{_HERE}.utils.logging"
_PIPE = f"{_HERE}.runtime.pipe"

__getattr__, __dir__ = lazy_names(_HERE, {
    **dict.fromkeys(("initialize", "add_config_arguments", "tp_model_init", "init_inference", "default_inference_config"),
                    "shoal.compat.entry"),
    "add_tuning_arguments": f"{_HERE}.runtime.lr_schedules",
    "checkpointing": f"{_HERE}.runtime.activation_checkpointing.checkpointing:",
    "dist": f"{_HERE}.comm:",
    "get_accelerator": f"{_HERE}.accelerator.real_accelerator",
    "init_distributed": f"{_HERE}.comm.comm",
    "is_compile_supported": f"{_HERE}.runtime.compiler",
    **dict.fromkeys(("log_dist", "logger"), _LOGGING),
    "zero": f"{_HERE}.runtime.zero:",
    "DeepSpeedConfig": f"{_HERE}.runtime.config",
    "DeepSpeedConfigError": f"{_HERE}.runtime.config",
    "DeepSpeedDataLoader": f"{_HERE}.runtime.dataloader",
    "DeepSpeedEngine": f"{_HERE}.runtime.engine",
    "DeepSpeedHybridEngine": f"{_HERE}.runtime.hybrid_engine",
    "DeepSpeedInferenceConfig": f"{_HERE}.inference.config",
    "DeepSpeedOptimizer": f"{_HERE}.runtime.base_optimizer",
    **dict.fromkeys(("DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"), f"{_HERE}.ops.transformer"),
    "InferenceEngine": f"{_HERE}.inference.engine",
    "OnDevice": f"{_HERE}.utils.init_on_device",
    "PipelineEngine": f"{_PIPE}.engine",
    "PipelineModule": f"{_PIPE}.module",
    **dict.fromkeys(("replace_transformer_layer", "revert_transformer_layer", "set_autotp_mode"), f"{_HERE}.module_inject"),
    "ADAM_OPTIMIZER": f"{_HERE}.runtime.config",
    "LAMB_OPTIMIZER": f"{_HERE}.runtime.config",
    "TORCH_DISTRIBUTED_DEFAULT_PORT": f"{_HERE}.constants",
})
