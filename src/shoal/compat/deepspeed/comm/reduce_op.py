"""The published reductions."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch.distributed as dist

__all__ = ["ReduceOp", "torch_op"]


class ReduceOp(Enum):
    """The operation of a reduction."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


def torch_op(op: Any) -> Any:
    """Return torch's reduction of the same name; another object as it is."""
    return getattr(dist.ReduceOp, op.name) if isinstance(op, ReduceOp) else op
