"""Which blocks a reader sees: half of its heads the bytes just before, the other half also every definition before.

    near heads    the block itself and `WINDOW` blocks before it
    far heads     these, the first block of the text, and every earlier block in which a name is defined
    dense         all heads: every earlier block

A row of blocks follows from blocks before it alone, so that no layout tells a byte that is still to be predicted.
"""

from __future__ import annotations

import torch

from documents import defining_blocks
from shoal.attention import Blocks

BLOCK, WINDOW = 64, 4


def sparse(text: bytes, heads: int) -> Blocks:
    """Return the blocks of `text`, whose length is a multiple of `BLOCK`, for an even number of heads."""
    defines = defining_blocks(text, BLOCK)
    at = torch.arange(len(defines))
    before = at[:, None] - at
    near = (before >= 0) & (before <= WINDOW)
    defines[0] = True
    far = near | ((before > 0) & defines)
    return Blocks.of(torch.stack([near] * (heads // 2) + [far] * (heads // 2)), BLOCK)


def dense(length: int) -> Blocks:
    """Return the layout of dense attention of `length` positions; the causal mask cuts it."""
    return Blocks.dense(length, length, BLOCK)
