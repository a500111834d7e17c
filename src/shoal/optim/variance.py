"""A variance that takes some gradients only, and stands still in between.

    measured step   v = beta2 v + (1 - beta2) g^2,   count = count + 1
    other steps     v as it is, settled when the first of them comes
    used as         v / (1 - beta2^count)

Signs have one magnitude for a block of elements, and an element whose variance is far below its block's would be stepped
far too far by it: settled, it is at least a fraction of its block's mean. An element that had no gradient so far (v = 0)
takes no step at all until it is measured again: its variance is infinite.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.signs import BLOCK

__all__ = ["follow", "settle", "started"]

_COUNT, _SETTLED = "measured", "settled"


def started(state: dict[str, Any]) -> None:
    """Add what is kept of a variance that has taken nothing: scalars, as `step` is."""
    state.update({_COUNT: torch.zeros(()), _SETTLED: torch.zeros(())})


def follow(state: dict[str, Any], *, measured: bool, floor: float) -> int:
    """Let the variance of `state` be ready for a step, and return how many gradients it will have taken then."""
    variance, settled = state["exp_avg_sq"], bool(state[_SETTLED])
    if measured:
        state[_COUNT] += 1
        if settled:
            variance[variance == math.inf] = 0
    elif not settled:
        settle(variance, floor)
    state[_SETTLED].fill_(not measured)
    return int(state[_COUNT].item())


@torch.no_grad()
def settle(variance: Tensor, floor: float) -> None:
    """Bound `variance` (n,) from below by `floor` times the mean of a block; what is zero becomes infinite."""
    never = variance == 0
    for block in variance.split(BLOCK):
        block.clamp_(min=float(block.mean()) * floor)
    variance[never] = math.inf
