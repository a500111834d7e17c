"""Linear layers whose weight is cut over the ranks of a tensor axis: by columns of outputs, or by rows of inputs.

    y = row(f(column(x)))     every rank computes its part of the wide middle; two sums an iteration, of x's size

Sizes in constructors, `in_features` and `out_features` are those of the whole layer; `weight` and `bias` are this rank's
parts, and `cuts` says which. Built from sizes, all ranks together hold what one rank would have drawn; built from a whole
layer, its values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.mesh.tensor_slice import TensorSlice, divided
from shoal.tensor_parallel.axis import Axis
from shoal.tensor_parallel.linear import column, row
from shoal.tensor_parallel.part_init import Taken, drawn
from shoal.tensor_parallel.regions import gather, split

__all__ = ["ColumnLinear", "CutLinear", "QKVLinear", "RowLinear"]


class CutLinear(nn.Module):
    """What all cuts of a linear layer have in common. `extent` is the local one of the weight's cut dim."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, axis: Axis, weight_cut: TensorSlice,
                 bias_cut: TensorSlice | None, *,
                 extent: int):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self._axis = axis
        self._weight_cut = weight_cut
        self._bias_cut = bias_cut
        self._extent = extent
        self._input_first = False

    @property
    def matrix(self) -> Tensor:
        """This rank's part of the weight as (outputs, inputs), however it is stored."""
        return self.weight.t() if self._input_first else self.weight

    def cuts(self) -> Mapping[str, TensorSlice]:
        """Return the cuts of the weight, and of the bias where it is cut."""
        cuts = {"weight": self._weight_cut}
        if self.bias is not None and self._bias_cut is not None:
            cuts["bias"] = self._bias_cut
        return cuts

    def extra_repr(self) -> str:
        return (f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
                f"rank {self._axis.rank} of {self._axis.ranks}")

    def draw(self, *, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Give the layer its parts of what `nn.Linear` draws: both uniform within 1 / sqrt(in_features)."""
        self.weight = nn.Parameter(drawn((self.out_features, self.in_features), self._weight_cut, self._extent,
                                         lambda block: nn.init.kaiming_uniform_(block, a=math.sqrt(5)), device=device,
                                         dtype=dtype))
        if not bias:
            self.register_parameter("bias", None)
            return
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
        cut, extent = self._bias_cut, self._extent
        if cut is None:
            cut, extent = TensorSlice.even(0, (self.out_features,), 0, 1), self.out_features
        self.bias = nn.Parameter(drawn((self.out_features,), cut, extent,
                                       lambda block: nn.init.uniform_(block, -bound, bound), device=device,
                                       dtype=dtype))

    def adopt(self, module: nn.Module, taken: Taken | None, *, input_first: bool = False) -> Self:
        """Give the layer its parts of `module`'s weight (outputs, inputs), or (inputs, outputs), and of its bias."""
        taken = taken or Taken()
        weight, bias = parameters_of(module)
        self._input_first = input_first
        if input_first:
            self._weight_cut = replace(self._weight_cut, dim=1 - self._weight_cut.dim)
        self.weight = taken.take(weight, self._weight_cut, self._extent)
        if bias is not None:
            self.bias = bias if self._bias_cut is None else taken.take(bias, self._bias_cut, self._extent)
        return self


class ColumnLinear(CutLinear):
    """A linear layer of which every rank computes an equal part of the outputs.

    `parts` are the sizes of several outputs that lie one after the other in a fused one: each is cut by itself. The input
    (..., in_features) is whole, or with `sequence_dim` split along that dim, in which case it is gathered. With `entered`
    it has come through `regions.enter` already, once for several layers. The output (..., out_features / ranks) is this
    rank's part, or with `gather_output` the whole.

    Sent per rank and pass, with n bytes of whole input and N ranks: forward 0, backward 2 n (N-1)/N; with `sequence_dim`
    forward n (N-1)/N, backward twice that (the input is gathered again, not kept); `gather_output` adds (N-1) times the
    part in forward.
    """

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup, *, bias: bool = True,
                 parts: Sequence[int] | None = None, gather_output: bool = False, sequence_dim: int | None = None,
                 entered: bool = False, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        sizes = (out_features,) if parts is None else tuple(parts)
        if sum(sizes) != out_features:
            raise UsageError(f"ColumnLinear: parts {sizes} are {sum(sizes)} outputs together, and out_features is "
                             f"{out_features}; let them add up to it")
        axis = Axis(group)
        for size in sizes:
            divided(f"ColumnLinear: {size} outputs", size, axis.ranks)
        cut = TensorSlice.even(0, sizes, axis.rank, axis.ranks)
        super().__init__(in_features, out_features, axis, cut, cut, extent=cut.length)
        self._gather_output = gather_output
        self._sequence_dim = sequence_dim
        self._entered = entered
        self._sizes = sizes
        if gather_output and len(sizes) > 1:
            raise UsageError("ColumnLinear: gather_output of a fused layer would put the parts out of order; gather each of "
                             "them, or leave gather_output out")
        self.draw(bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_linear(cls, module: nn.Module, group: dist.ProcessGroup, *, parts: Sequence[int] | None = None,
                    gather_output: bool = False, sequence_dim: int | None = None, entered: bool = False,
                    input_first: bool = False, taken: Taken | None = None) -> ColumnLinear:
        """Return a layer with this rank's part of `module`, an `nn.Linear` or what has a weight and a bias like one.

        `input_first` says that the weight is (inputs, outputs), as in GPT-2's Conv1D. `taken` are parts of other modules,
        with which this one may share parameters.
        """
        inputs, outputs, bias = sizes_of(module, input_first=input_first)
        layer = ColumnLinear(inputs, outputs, group, bias=bias, parts=parts, gather_output=gather_output,
                             sequence_dim=sequence_dim, entered=entered, device="meta")
        return layer.adopt(module, taken, input_first=input_first)

    def forward(self, x: Tensor) -> Tensor:
        if self._entered:
            y = nn.functional.linear(x, self.matrix, self.bias)
        else:
            y = column(x, self.matrix, self.bias, self._axis, self._sequence_dim)
        return gather(y, self._axis, -1) if self._gather_output else y


class RowLinear(CutLinear):
    """A linear layer of which every rank takes an equal part of the inputs; the outputs are summed over the ranks.

    The input (..., in_features / ranks) is this rank's part, as a column layer leaves it; if not `input_is_parallel`, the
    whole. The output is whole, or with `sequence_dim` split along that dim. The bias is whole, added once, and its gradient
    is the same on every rank.

    Sent per rank and pass, with n bytes of whole output and N ranks: forward 2 n (N-1)/N, backward 0; with `sequence_dim`
    forward and backward n (N-1)/N each; a whole input adds its (N-1)/N in backward.
    """

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup, *, bias: bool = True,
                 input_is_parallel: bool = True, sequence_dim: int | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        axis = Axis(group)
        divided(f"RowLinear: {in_features} inputs", in_features, axis.ranks)
        cut = TensorSlice.even(1, (in_features,), axis.rank, axis.ranks)
        super().__init__(in_features, out_features, axis, cut, None, extent=cut.length)
        self._input_is_parallel = input_is_parallel
        self._sequence_dim = sequence_dim
        self.draw(bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_linear(cls, module: nn.Module, group: dist.ProcessGroup, *, input_is_parallel: bool = True,
                    sequence_dim: int | None = None, input_first: bool = False, taken: Taken | None = None) -> RowLinear:
        """Return a layer with this rank's part of `module`; see `ColumnLinear.from_linear`."""
        inputs, outputs, bias = sizes_of(module, input_first=input_first)
        layer = RowLinear(inputs, outputs, group, bias=bias, input_is_parallel=input_is_parallel,
                          sequence_dim=sequence_dim, device="meta")
        return layer.adopt(module, taken, input_first=input_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self._input_is_parallel else split(x, self._axis, -1)
        if x.shape[-1] != self._extent:
            raise UsageError(f"RowLinear: got an input of {x.shape[-1]} features, and this rank's part is {self._extent} of "
                             f"{self.in_features}; let a column layer come before it, whose outputs are cut likewise")
        return row(x, self.matrix, self.bias, self._axis, self._sequence_dim)


class QKVLinear(ColumnLinear):
    """The fused projection to queries, keys and values: every rank has the same number of whole heads of each.

    `heads` are those of the queries, `key_value_heads` (as many by default) those of keys and values, each of which equally
    many queries share. The outputs are all queries, all keys, all values; or if `interleaved`, for each key/value head its
    queries, its key and its value. A rank's part has the same layout, of its heads.
    """

    def __init__(self, in_features: int, heads: int, head_dim: int, group: dist.ProcessGroup, *,
                 key_value_heads: int | None = None, interleaved: bool = False, bias: bool = True,
                 sequence_dim: int | None = None, entered: bool = False, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None):
        shared = heads if key_value_heads is None else key_value_heads
        parts = qkv_parts(heads, shared, head_dim, dist.get_world_size(group), interleaved=interleaved)
        super().__init__(in_features, sum(parts), group, bias=bias, parts=parts, sequence_dim=sequence_dim, entered=entered,
                         device=device, dtype=dtype)
        self._interleaved = interleaved
        self.head_dim = head_dim
        self.local_heads = heads // self._axis.ranks
        self.local_key_value_heads = shared // self._axis.ranks

    def split_heads(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (..., this rank's heads, head_dim) of the layer's output."""
        heads, shared = self.local_heads, self.local_key_value_heads
        if not self._interleaved:
            q, k, v = fused.unflatten(-1, (-1, self.head_dim)).split((heads, shared, shared), -2)
            return q, k, v
        grouped = fused.unflatten(-1, (shared, heads // shared + 2, self.head_dim))
        q, k, v = grouped.split((heads // shared, 1, 1), -2)
        return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)


def qkv_parts(heads: int, key_value_heads: int, head_dim: int, ranks: int, *, interleaved: bool) -> tuple[int, ...]:
    """Return the sizes of what is cut by itself in a fused projection. Raises `UsageError` for heads that do not divide."""
    divided(f"{heads} heads", heads, ranks)
    divided(f"{key_value_heads} key/value heads", key_value_heads, ranks)
    if heads % key_value_heads:
        raise UsageError(f"{heads} heads cannot share {key_value_heads} key/value heads equally; make the first a multiple "
                         f"of the second")
    queries, keys = heads * head_dim, key_value_heads * head_dim
    return (queries + 2 * keys,) if interleaved else (queries, keys, keys)


def parameters_of(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return the weight (2-D) and the bias of a linear layer. Raises `UsageError` for a module that is none."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    weight, bias = own.pop("weight", None), own.pop("bias", None)
    if weight is None or weight.ndim != 2 or own:
        raise UsageError(f"{type(module).__name__} is no linear layer: one has a weight of two dims and perhaps a bias, and "
                         f"this has {({name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)})}")
    return weight, bias


def sizes_of(module: nn.Module, *, input_first: bool) -> tuple[int, int, bool]:
    """Return the inputs and outputs of a linear layer, and whether it has a bias."""
    weight, bias = parameters_of(module)
    inputs, outputs = weight.shape if input_first else reversed(weight.shape)
    return inputs, outputs, bias is not None
