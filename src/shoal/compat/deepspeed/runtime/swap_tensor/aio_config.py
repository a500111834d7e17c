"""The published section `aio`."""

from __future__ import annotations

from typing import Any

from shoal.compat.deepspeed.runtime.config_utils import get_scalar_param

__all__ = ["AIO", "AIO_DEFAULT_DICT", "get_aio_config"]

AIO = "aio"
AIO_DEFAULT_DICT = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False,
                    "overlap_events": True, "use_gds": False}


def get_aio_config(param_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the block `aio` of a whole configuration, with its defaults."""
    section = param_dict.get(AIO, {})
    return {key: get_scalar_param(section, key, default) for key, default in AIO_DEFAULT_DICT.items()}
