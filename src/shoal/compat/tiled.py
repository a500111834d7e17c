"""The published tiled computations: a function runs over tiles of positions, each recomputed in backward.

`apply` takes what the published autograd functions take, and computes by `shoal.nn.tiled_module`. `compute_params` names the
parameters of the function for DeepSpeed, which reduces gradients by hand there. Here autograd sums the gradients of all
tiles before one is reduced, so the argument is not needed: all gradients are those of the whole, frozen parameters and
inputs without a gradient included, and a loss may be scaled after `apply`. Running statistics of modules that the function
gets, or belongs to, count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.activation.checkpointing import module_of
from shoal.compat.raising import as_published
from shoal.errors import UsageError
from shoal.nn.tiled_module import over_tiles

__all__ = ["SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "sequence_tiled_compute"]

Parameters = Iterable[Tensor] | None


class TiledMLP:
    """An MLP over tiles of its sequence."""

    @staticmethod
    @as_published
    def apply(fn: Callable[..., Any], self: Any, x: Tensor, shards: int, compute_params: Parameters = None) -> Tensor:
        """Return `fn(self, x)` for x (..., sequence, hidden), cut into at most `shards` tiles along the sequence.

        Raises `ValueError` for fewer than one shard, or a function that changes the number of positions.
        """
        def call(tile: Tensor) -> Tensor:
            return fn(self, tile.contiguous())  # functions call `view`

        length = x.shape[-2]
        output = torch.cat(over_tiles(call, [x], rows=_rows(length, shards), dim=-2, modules=_modules(fn, self)), -2)
        if output.shape[-2] != length:
            raise UsageError(f"TiledMLP: the function made {output.shape[-2]} positions of {length}; only one that maps "
                             f"each position by itself can run in tiles")
        return output


class TiledFusedLogitsLoss:
    """Logits and their loss over tiles of tokens."""

    @staticmethod
    @as_published
    def apply(fn: Callable[..., Any], self: Any, x: Tensor, y: Tensor, mask: Tensor | None, shards: int,
              compute_params: Parameters = None, output_reduction: str = "mean") -> Tensor:
        """Return the mean or the sum of `fn(self, x, y)` over at most `shards` tiles of tokens.

        x is (batch, sequence, ...), y and mask (batch, sequence, ...); the function gets tiles of them as (tokens, ...), and
        the mask as its fourth argument if there is one. Tiles are weighted alike, so a mean over tokens is that of the whole
        if every tile has as many that count; else sum, and divide. Raises `ValueError` for other reductions and shapes.
        """
        tensors = [x, y] if mask is None else [x, y, mask]
        if any(tensor.dim() < 2 or tensor.shape[:2] != x.shape[:2] for tensor in tensors):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise UsageError(f"TiledFusedLogitsLoss: got {shapes}; all begin with (batch, sequence)")
        flat = [tensor.flatten(0, 1) for tensor in tensors]
        return _reduced(over_tiles(partial(fn, self), flat, rows=_rows(len(flat[0]), shards), dim=0,
                                   modules=_modules(fn, self)), output_reduction)


class SequenceTiledCompute:
    """A function of any keywords over tiles of the sequence."""

    @staticmethod
    @as_published
    def apply(fn: Callable[..., Any], seqlen: int, shards: int, keys_to_shard: Sequence[str], keys_to_pass: Sequence[str],
              grad_requiring_tensor_key: str, compute_params: Parameters, output_unshard_dimension: int,
              output_reduction: str | None, *args: Any) -> Tensor:
        """Do as `sequence_tiled_compute`; `args` are the values of `keys_to_shard`, and then those of `keys_to_pass`."""
        values = dict(zip([*keys_to_shard, *keys_to_pass], args, strict=True))
        return sequence_tiled_compute(
            fn, seqlen, shards, {key: values[key] for key in keys_to_shard}, {key: values[key] for key in keys_to_pass},
            grad_requiring_tensor_key, compute_params, output_unshard_dimension, output_reduction)


@as_published
def sequence_tiled_compute(fn: Callable[..., Any], seqlen: int, shards: int, kwargs_to_shard: Mapping[str, Tensor],
                           kwargs_to_pass: Mapping[str, Any], grad_requiring_tensor_key: str,
                           compute_params: Parameters = None, output_unshard_dimension: int = 1,
                           output_reduction: str | None = "mean") -> Tensor:
    """Return `fn(**kwargs_to_shard, **kwargs_to_pass)` over at most `shards` tiles along dim 1 of the tensors to shard.

    The outputs of tiles are joined along `output_unshard_dimension` where `output_reduction` is None; else their mean or sum
    is returned. Every tensor that needs a gradient gets one, and not that of `grad_requiring_tensor_key` alone. Raises
    `ValueError` for a length other than `seqlen`, a key that is not sharded, and an unknown reduction.
    """
    keys, tensors = [*kwargs_to_shard], [*kwargs_to_shard.values()]
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise UsageError(f"sequence_tiled_compute: grad_requiring_tensor_key: got {grad_requiring_tensor_key!r}; choose one "
                         f"of {', '.join(keys)}")
    for key, tensor in kwargs_to_shard.items():
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None  # pyright: ignore[reportUnnecessaryIsInstance]  a script's
        if shape is None or shape[1:2] != (seqlen,):
            raise UsageError(f"sequence_tiled_compute: {key}: got {shape or tensor}; give a tensor (batch, {seqlen}, ...), "
                             f"or pass it whole")

    def call(*tile: Tensor) -> Any:
        contiguous = (each.contiguous() for each in tile)
        return fn(**dict(zip(keys, contiguous, strict=True)), **kwargs_to_pass)

    outputs = over_tiles(call, tensors, rows=_rows(seqlen, shards), dim=1, modules=_modules(fn, *kwargs_to_pass.values()))
    return torch.cat(outputs, output_unshard_dimension) if output_reduction is None else _reduced(outputs, output_reduction)


def _modules(function: Callable[..., Any], *values: Any) -> list[nn.Module]:
    """Return the modules among `values`, and the one that `function` is or belongs to: recompute writes to no buffer."""
    return [*dict.fromkeys(each for each in (module_of(function), *values) if isinstance(each, nn.Module))]


def _rows(length: int, shards: int) -> int:
    """Return the positions of a tile, of which `shards` cover `length`."""
    if shards < 1:
        raise UsageError(f"tiles: shards: got {shards}; give 1 or more")
    return max(1, -(-length // shards))


def _reduced(outputs: Sequence[Tensor], reduction: str) -> Tensor:
    match reduction:
        case "mean":
            return torch.stack([*outputs]).mean(0)
        case "sum":
            return torch.stack([*outputs]).sum(0)
        case _:
            raise UsageError(f"tiles: output_reduction: got {reduction!r}; choose 'mean' or 'sum'")
