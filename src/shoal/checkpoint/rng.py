"""The random state of one rank: `capture` returns it as plain values, `restore` sets it again."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shoal.device import accelerator, current_device, is_initialized, rng_state, set_rng_state
from shoal.log import logger

__all__ = ["capture", "restore"]


def capture() -> dict[str, object]:
    """Return the states of Python's, numpy's global, torch's CPU and the current accelerator's generators.

    The last, with the kind of the device, only if the device is in use, so that this call does not start it.
    """
    kind = accelerator()
    drawn = kind is not None and is_initialized(kind)
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state(),
            "accelerator": rng_state(current_device()) if drawn else None,
            "accelerator_kind": kind.type if kind is not None and drawn else None}


def restore(state: dict[str, object]) -> None:
    """Set the generators to a state that `capture` returned, directly or loaded from a checkpoint.

    The state of an accelerator of another kind than the present one is ignored with a warning.
    """
    random.setstate(cast("tuple[Any, ...]", state["python"]))
    np.random.set_state(cast("dict[str, Any]", state["numpy"]))
    torch.set_rng_state(cast(Tensor, state["torch"]))
    kind, saved = _saved(state)
    if saved is None:
        return
    device = current_device()
    if device.type == kind:
        set_rng_state(device, saved)
    else:
        logger.warning("the checkpoint contains the random state of a device of kind %s; ranks compute on %s here, so it is "
                       "ignored", kind, device.type)


def _saved(state: dict[str, object]) -> tuple[str, Tensor | None]:
    """Return the kind of the accelerator whose state was saved, and the state."""
    if "cuda" in state:  # checkpoints from before other kinds of devices
        return "cuda", cast("Tensor | None", state["cuda"])
    return str(state["accelerator_kind"]), cast("Tensor | None", state["accelerator"])
