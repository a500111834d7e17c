"""Checkpoints under their published names."""

from shoal.compat.deepspeed.checkpoint.constants import *  # noqa: F403
from shoal.compat.lazy import lazy_names

_HERE = __name__

__getattr__, __dir__ = lazy_names(_HERE, {
    **dict.fromkeys(("SubparamShape", "enable_universal_checkpoint"), f"{_HERE}.universal_checkpoint"),
    **dict.fromkeys(("get_model_3d_descriptor", "model_3d_desc"), f"{_HERE}.reshape_3d_utils"),
    **dict.fromkeys(("meg_2d_parallel_map", "reshape_meg_2d_parallel"), f"{_HERE}.reshape_meg_2d"),
    "DeepSpeedCheckpoint": f"{_HERE}.deepspeed_checkpoint",
    "ZeROCheckpoint": f"{_HERE}.zero_checkpoint",
    "merge_state": f"{_HERE}.reshape_utils",
    **{f"get_{kind}_ckpt_name_for_rank": f"{_HERE}.utils" for kind in ("layer", "model", "zero")}})
