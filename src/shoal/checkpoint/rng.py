"""Random state is private state: one rank's generators, captured as plain values and put back exactly."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shoal.log import logger

__all__ = ["capture", "restore"]


def capture() -> dict[str, object]:
    """Return the state of this rank's generators: python, numpy (the global one), torch on the CPU and the current GPU.

    The GPU is asked only when CUDA is in use, so that this initialises no device.
    """
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state(),
            "cuda": cuda}


def restore(state: dict[str, object]) -> None:
    """Put back what `capture` returned, or what a checkpoint made of it.

    A GPU's state is left out, with a warning, where there is no GPU.
    """
    random.setstate(cast("tuple[Any, ...]", state["python"]))
    np.random.set_state(cast("dict[str, Any]", state["numpy"]))
    torch.set_rng_state(cast(Tensor, state["torch"]))
    if (cuda := cast("Tensor | None", state["cuda"])) is None:
        return
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    else:
        logger.warning("the checkpoint holds the random state of a GPU, and here is none: it is left out")
