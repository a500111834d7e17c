"""The random state of one rank: `capture` returns it as plain values, `restore` sets it again."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shoal.log import logger

__all__ = ["capture", "restore"]


def capture() -> dict[str, object]:
    """Return the states of Python's, numpy's global, torch's CPU and the current GPU's generators.

    The GPU is included only if CUDA is initialized, so that this call does not initialize it.
    """
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state(),
            "cuda": cuda}


def restore(state: dict[str, object]) -> None:
    """Set the generators to a state that `capture` returned, directly or loaded from a checkpoint.

    Without a GPU, a GPU's state is ignored with a warning.
    """
    random.setstate(cast("tuple[Any, ...]", state["python"]))
    np.random.set_state(cast("dict[str, Any]", state["numpy"]))
    torch.set_rng_state(cast(Tensor, state["torch"]))
    if (cuda := cast("Tensor | None", state["cuda"])) is None:
        return
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    else:
        logger.warning("the checkpoint contains the random state of a GPU; there is no GPU here, so it is ignored")
