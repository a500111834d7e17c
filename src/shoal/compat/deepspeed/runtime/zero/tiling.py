"""A linear layer cut into tiles, so that stage 3 gathers one tile of the weight at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.zero.gathered import gathered

__all__ = ["TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"]


def split_tensor_along_last_dim(tensor: Tensor, partitions: Sequence[int],
                                contiguous_split_chunks: bool = False) -> list[Tensor]:
    """Cut `tensor` along its last dim at the borders `partitions`, which begin with 0 and end with the size."""
    sizes = [stop - start for start, stop in pairwise(partitions)]
    pieces = tensor.split(sizes, dim=-1)
    return [piece.contiguous() for piece in pieces] if contiguous_split_chunks else list(pieces)


def _borders(size: int, parts: int) -> list[int]:
    """Return the borders of `parts` pieces of nearly equal sizes, the larger ones first."""
    small, larger = divmod(size, parts)
    borders = [0]
    for part in range(parts):
        borders.append(borders[-1] + small + (part < larger))
    return borders


class TiledLinear(nn.Module):
    """y = x W^T + b, with W cut into `out_splits` x `in_splits` tiles that are modules of their own.

    With `input_is_already_split` the input is a sequence of its pieces; without `combine_out_splits` so is the output.
    `linear_cls` makes each tile; `init_linear` is a layer whose values the tiles take. Raises `RuntimeError` for splits
    outside 1 to the features.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, in_splits: int = 1, out_splits: int = 1,
                 input_is_already_split: bool = False, combine_out_splits: bool = True,
                 linear_cls: Callable[..., nn.Module] = nn.Linear, init_linear: nn.Linear | None = None, **kwargs: Any):
        super().__init__()
        for name, splits, features in (("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise UsageError(f"TiledLinear: {name}: got {splits}; it must be 1 to {features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _borders(in_features, in_splits), _borders(out_features, out_splits)
        widths = [stop - start for start, stop in pairwise(self.in_parts)]
        heights = [stop - start for start, stop in pairwise(self.out_parts)]
        # The bias is that of the last tile of a row, whose product is added last.
        self.linears = nn.ModuleList(
            nn.ModuleList(linear_cls(width, height, bias=bias and index == in_splits - 1, **kwargs)
                          for index, width in enumerate(widths)) for height in heights)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Return the output, whole or as a list of pieces."""
        inputs = list(input_) if self.in_splits > 1 and self.input_is_already_split else (
            split_tensor_along_last_dim(input_, self.in_parts) if self.in_splits > 1 else [input_])
        if len(inputs) != self.in_splits:
            raise UsageError(f"TiledLinear: got {len(inputs)} pieces of the input; in_splits is {self.in_splits}")
        outputs: list[Any] = []
        for row in self.linears:
            total: Any = None
            for tile, piece in zip(row, inputs, strict=True):  # pyright: ignore[reportArgumentType]  a ModuleList
                total = self._reduce_local_output(tile, piece, total)
            outputs.append(total)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _reduce_local_output(self, tile: nn.Module, piece: Tensor, total: Any) -> Any:
        product = tile(piece)
        return product if total is None else total + product

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take over the values of a layer of the same features; every rank calls it."""
        with gathered(other.parameters(recurse=False)):
            if tuple(other.weight.shape) != (self.out_features, self.in_features):
                raise AssertionError(f"copy_params_from: got a weight of shape {tuple(other.weight.shape)}; it must be "
                                     f"{(self.out_features, self.in_features)}")
            for row, (top, bottom) in zip(self.linears, pairwise(self.out_parts), strict=True):
                for tile, (left, right) in zip(row, pairwise(self.in_parts), strict=True):  # pyright: ignore[reportArgumentType]  a ModuleList
                    with gathered(tile, modifier_rank=0):
                        tile.weight.copy_(other.weight[top:bottom, left:right])
                if self.use_bias and other.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]  a layer may have none
                    last = row[-1]  # pyright: ignore[reportIndexIssue]  a ModuleList
                    with gathered(last, modifier_rank=0):
                        last.bias.copy_(other.bias[top:bottom])


class TiledLinearReturnBias(TiledLinear):
    """The same for layers that return their product and their bias apart, as Megatron's do."""

    def _reduce_local_output(self, tile: nn.Module, piece: Tensor, total: Any) -> Any:
        product, bias = tile(piece)
        before = (None, None) if total is None else total
        return (product if before[0] is None else before[0] + product, bias if bias is not None else before[1])

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        product = torch.cat([product for product, _ in outputs], dim=-1)
        biases = [bias for _, bias in outputs if bias is not None]
        return product, torch.cat(biases, dim=-1) if biases else None
