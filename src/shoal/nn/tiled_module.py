"""A module that treats each position by itself, such as an MLP, runs over tiles of positions and keeps only their inputs.

    y = cat(module(x_1), ..., module(x_n))        x cut along a dim

Each tile is recomputed in backward: the memory of a module's intermediates is that of one tile, whatever the length. Time
is one forward more. The values are those of the whole, but for the order of sums in the weights' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.activation.replay import replayed
from shoal.errors import UsageError

__all__ = ["TiledMLP", "in_tiles", "over_tiles"]


def over_tiles(function: Callable[..., Any], tensors: Sequence[Tensor], *, rows: int, dim: int,
               modules: Sequence[nn.Module] = ()) -> list[Any]:
    """Return the outputs of `function` for tiles of `tensors`, `rows` positions along `dim` each, recomputed in backward.

    Random numbers of the recompute are those of the forward, and so are the buffers of `modules`. Raises UsageError for rows
    below 1, or tensors of several lengths.
    """
    _check_rows("over_tiles", rows)
    lengths = {tensor.shape[dim] for tensor in tensors}
    if len(lengths) > 1:
        raise UsageError(f"over_tiles: got tensors of {', '.join(map(str, sorted(lengths)))} positions along dim {dim}; "
                         f"give tensors of one length")
    tiles = zip(*(tensor.split(rows, dim) for tensor in tensors), strict=True)
    return [checkpoint(function, *tile, use_reentrant=False, preserve_rng_state=False,
                       context_fn=partial(replayed, "a function over tiles", modules)) for tile in tiles]


def in_tiles(module: nn.Module, x: Tensor, *, rows: int, dim: int = -2) -> Tensor:
    """Return `module(x)`, computed over tiles of `rows` positions along `dim`, each recomputed in backward.

    `module` must map each position by itself, as linear layers, norms and activations do. Random numbers of the recompute
    are those of the forward. Raises UsageError for rows below 1, or a module that changes the number of positions.
    """
    _check_rows("in_tiles", rows)
    if not -x.dim() <= dim < x.dim():
        raise UsageError(f"in_tiles: got an input {tuple(x.shape)}, which has no dim {dim} of positions")
    outputs = over_tiles(module, [x], rows=rows, dim=dim, modules=[module])
    if not isinstance(outputs[0], Tensor):
        raise UsageError(f"in_tiles: {type(module).__name__} returned a {type(outputs[0]).__name__}; only a module that "
                         f"returns one tensor can run in tiles")
    output = torch.cat(outputs, dim)
    if output.shape[dim] != x.shape[dim]:
        raise UsageError(f"in_tiles: {type(module).__name__} made {output.shape[dim]} positions of {x.shape[dim]} along dim "
                         f"{dim}; only a module that maps each position by itself can run in tiles")
    return output


def _check_rows(what: str, rows: object) -> None:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise UsageError(f"{what}: rows: got {rows!r}; give 1 or more positions")


class TiledMLP(nn.Module):
    """`module` over tiles of `rows` positions; its parameters are under `module.`."""

    def __init__(self, module: nn.Module, *, rows: int, dim: int = -2):
        super().__init__()
        _check_rows("TiledMLP", rows)
        self.module, self.rows, self.dim = module, rows, dim

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of `module` for `x`."""
        return in_tiles(self.module, x, rows=self.rows, dim=self.dim)
