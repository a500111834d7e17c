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
_ENTRY = "shoal.compat.entry"

__getattr__, __dir__ = lazy_names(_HERE, {
    "initialize": _ENTRY,
    "add_config_arguments": _ENTRY,
    "tp_model_init": _ENTRY,
    "init_distributed": f"{_HERE}.comm.comm",
    "zero": f"{_HERE}.runtime.zero:",
    "dist": f"{_HERE}.comm:",
    "checkpointing": f"{_HERE}.runtime.activation_checkpointing.checkpointing:",
    "get_accelerator": f"{_HERE}.accelerator.real_accelerator",
    "DeepSpeedEngine": f"{_HERE}.runtime.engine",
    "PipelineEngine": f"{_HERE}.runtime.pipe.engine",
    "PipelineModule": f"{_HERE}.runtime.pipe.module",
    "logger": f"{_HERE}.utils.logging",
    "log_dist": f"{_HERE}.utils.logging",
})
