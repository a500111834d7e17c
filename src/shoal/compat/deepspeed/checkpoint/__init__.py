"""Checkpoints under their published names."""

from shoal.compat.deepspeed.checkpoint.constants import *  # noqa: F403
from shoal.compat.lazy import lazy_names

_HERE = __name__

__getattr__, __dir__ = lazy_names(_HERE, {
    **{f"get_{kind}_ckpt_name_for_rank": f"{_HERE}.utils" for kind in ("layer", "model", "zero")}})
