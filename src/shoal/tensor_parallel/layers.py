"""Linear layers with their weight sliced over the ranks of a tensor axis, by output features or by input features.

    y = row(f(column(x)))     each rank has a slice of the wide intermediate; two all-reduces an iteration, of x's size

    column   W's rows are sliced:      each rank computes its slice of y from the whole x       (enter, then multiply)
    row      W's columns are sliced:   each rank computes an addend of y from its slice of x    (multiply, then leave)

`in_features`, `out_features` and all constructor sizes are those of the whole layer; `weight` and `bias` are this rank's
slices, which `cuts` describes. A layer built from sizes draws values so that all ranks together hold what one rank would
have drawn; a layer built from a whole one takes its values.

The product and its derivative are one autograd node: the gradient of x is reduced while that of W is computed. A node
computes a gradient only if the backward pass needs it. Under a schedule with separate weight-gradient passes it queues a
`WeightGradTask` (`pipeline/split_backward.py`) instead of computing the gradient of W.

Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.autograd import check_first_derivative, is_reached
from shoal.errors import UsageError
from shoal.mesh.tensor_slice import TensorSlice, divided
from shoal.pipeline.split_backward import WeightGradQueue, WeightGradTask, current_queue
from shoal.products import TORCH, Products
from shoal.tensor_parallel.axis import Axis, eager
from shoal.tensor_parallel.part_init import ParameterSlices, draw_slice
from shoal.tensor_parallel.regions import gather, gathered, joined, split, summed

__all__ = ["ColumnLinear", "ProductsOn", "QKVLinear", "RowLinear", "SlicedLinear", "column", "qkv_parts", "row", "sizes_of",
           "torch_products"]


ProductsOn = Callable[[torch.device], Products]
"""Returns the kernels of the products on a device."""


def torch_products(device: torch.device) -> Products:
    """Return torch's products: those of every layer that is told no others."""
    return TORCH


class SlicedLinear(nn.Module):
    """A linear layer with its weight sliced along one dim, of which this rank has `extent`."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, axis: Axis, weight_slice: TensorSlice,
                 bias_slice: TensorSlice | None, *, extent: int):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self._axis = axis
        self._weight_slice = weight_slice
        self._bias_slice = bias_slice
        self._extent = extent
        self._input_first = False
        self._products_on: ProductsOn = torch_products

    def use_products(self, products_on: ProductsOn) -> None:
        """Have what `products_on` returns for the input's device compute the products."""
        self._products_on = products_on

    @property
    def matrix(self) -> Tensor:
        """This rank's slice of the weight as (outputs, inputs), in whatever order it is stored."""
        return self.weight.t() if self._input_first else self.weight

    def cuts(self) -> Mapping[str, TensorSlice]:
        """Return the slice that this rank has of the weight, and of the bias if that is sliced."""
        slices = {"weight": self._weight_slice}
        if self.bias is not None and self._bias_slice is not None:
            slices["bias"] = self._bias_slice
        return slices

    def extra_repr(self) -> str:
        return (f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
                f"rank {self._axis.rank} of {self._axis.ranks}")

    def draw(self, *, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Draw this rank's slices of what `nn.Linear` draws, both uniform within 1 / sqrt(in_features)."""
        self.weight = nn.Parameter(draw_slice((self.out_features, self.in_features), self._weight_slice, self._extent,
                                              lambda block: nn.init.kaiming_uniform_(block, a=math.sqrt(5)), device=device,
                                              dtype=dtype))
        if not bias:
            self.register_parameter("bias", None)
            return
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
        bias_slice, extent = self._bias_slice, self._extent
        if bias_slice is None:
            bias_slice, extent = TensorSlice.even(0, (self.out_features,), 0, 1), self.out_features
        self.bias = nn.Parameter(draw_slice((self.out_features,), bias_slice, extent,
                                            lambda block: nn.init.uniform_(block, -bound, bound), device=device,
                                            dtype=dtype))

    def load_slices(self, module: nn.Module, slices: ParameterSlices | None, *, input_first: bool = False) -> Self:
        """Take this rank's slices of the weight of `module`, (outputs, inputs) or `input_first`, and of its bias."""
        slices = slices or ParameterSlices()
        weight, bias = _parameters_of(module)
        self._input_first = input_first
        if input_first:
            self._weight_slice = replace(self._weight_slice, dim=1 - self._weight_slice.dim)
        self.weight = slices.of(weight, self._weight_slice, self._extent)
        if bias is not None:
            self.bias = bias if self._bias_slice is None else slices.of(bias, self._bias_slice, self._extent)
        return self


class ColumnLinear(SlicedLinear):
    """A linear layer of which each rank computes an equal slice of the output features.

    `parts` are the sizes of several concatenated outputs of a fused layer; each is sliced separately. The input
    (..., in_features) is whole, or with `sequence_dim` split along that dim, in which case it is gathered. With `entered`
    it has passed `regions.enter` already, once for several layers. The output (..., out_features / ranks) is this rank's
    slice, or with `gather_output` the whole.

    Sent per rank and pass, with n bytes of whole input and N ranks: forward 0, backward 2 n (N-1)/N; with `sequence_dim`
    forward n (N-1)/N, backward twice that (the input is gathered again, not kept); `gather_output` adds (N-1) times the
    slice in forward. Raises `UsageError` for sizes that the ranks do not divide.
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
        own = TensorSlice.even(0, sizes, axis.rank, axis.ranks)
        super().__init__(in_features, out_features, axis, own, own, extent=own.length)
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
                    input_first: bool = False, slices: ParameterSlices | None = None) -> ColumnLinear:
        """Return a layer with this rank's slices of `module`, an `nn.Linear` or a module with the same weight and bias.

        `input_first`: the weight is (inputs, outputs), as in GPT-2's Conv1D. `slices` holds the slices that other modules
        have taken; a parameter that this module shares with them gives the same slice.
        """
        inputs, outputs, bias = sizes_of(module, input_first=input_first)
        layer = ColumnLinear(inputs, outputs, group, bias=bias, parts=parts, gather_output=gather_output,
                             sequence_dim=sequence_dim, entered=entered, device="meta")
        return layer.load_slices(module, slices, input_first=input_first)

    def forward(self, x: Tensor) -> Tensor:
        if self._entered:
            y = nn.functional.linear(x, self.matrix, self.bias)
        else:
            y = column(x, self.matrix, self.bias, self._axis, self._sequence_dim, self._products_on(x.device))
        return gather(y, self._axis, -1) if self._gather_output else y


class RowLinear(SlicedLinear):
    """A linear layer of which each rank multiplies an equal slice of the input features; the outputs are summed over ranks.

    The input (..., in_features / ranks) is this rank's slice, the output of a column layer; without `input_is_parallel`
    it is whole. The output is whole, or with `sequence_dim` split along that dim. The bias is whole, added once, and its
    gradient is the same on every rank.

    Sent per rank and pass, with n bytes of whole output and N ranks: forward 2 n (N-1)/N, backward 0; with `sequence_dim`
    forward and backward n (N-1)/N each; a whole input adds its (N-1)/N in backward.
    """

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup, *, bias: bool = True,
                 input_is_parallel: bool = True, sequence_dim: int | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        axis = Axis(group)
        divided(f"RowLinear: {in_features} inputs", in_features, axis.ranks)
        own = TensorSlice.even(1, (in_features,), axis.rank, axis.ranks)
        super().__init__(in_features, out_features, axis, own, None, extent=own.length)
        self._input_is_parallel = input_is_parallel
        self._sequence_dim = sequence_dim
        self.draw(bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_linear(cls, module: nn.Module, group: dist.ProcessGroup, *, input_is_parallel: bool = True,
                    sequence_dim: int | None = None, input_first: bool = False,
                    slices: ParameterSlices | None = None) -> RowLinear:
        """Return a layer with this rank's slices of `module`; see `ColumnLinear.from_linear`."""
        inputs, outputs, bias = sizes_of(module, input_first=input_first)
        layer = RowLinear(inputs, outputs, group, bias=bias, input_is_parallel=input_is_parallel,
                          sequence_dim=sequence_dim, device="meta")
        return layer.load_slices(module, slices, input_first=input_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self._input_is_parallel else split(x, self._axis, -1)
        if x.shape[-1] != self._extent:
            raise UsageError(f"RowLinear: got an input of {x.shape[-1]} features, and this rank's part is {self._extent} of "
                             f"{self.in_features}; let a column layer come before it, whose outputs are sliced likewise")
        return row(x, self.matrix, self.bias, self._axis, self._sequence_dim, self._products_on(x.device))


class QKVLinear(ColumnLinear):
    """The fused projection to queries, keys and values: each rank has the same number of whole heads of each.

    `heads` counts query heads, `key_value_heads` (by default as many) those of keys and values; the same number of query
    heads shares each of them. The outputs are all queries, all keys, all values; or if `interleaved`, for each key/value
    head its queries, its key and its value. A rank's slice has the same layout, with its own heads. Raises `UsageError`
    for heads that the ranks do not divide.
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
    """Return the sizes of the separately sliced outputs of a fused projection.

    Raises `UsageError` for heads that the ranks do not divide.
    """
    divided(f"{heads} heads", heads, ranks)
    divided(f"{key_value_heads} key/value heads", key_value_heads, ranks)
    if heads % key_value_heads:
        raise UsageError(f"{heads} heads cannot share {key_value_heads} key/value heads equally; make the first a multiple "
                         f"of the second")
    queries, keys = heads * head_dim, key_value_heads * head_dim
    return (queries + 2 * keys,) if interleaved else (queries, keys, keys)


def _parameters_of(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return the weight (2-D) and the bias of a linear layer. Raises `UsageError` for any other module."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    weight, bias = own.pop("weight", None), own.pop("bias", None)
    if weight is None or weight.ndim != 2 or own:
        raise UsageError(f"{type(module).__name__} is no linear layer: one has a weight of two dims and perhaps a bias, and "
                         f"this has {({name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)})}")
    return weight, bias


def sizes_of(module: nn.Module, *, input_first: bool) -> tuple[int, int, bool]:
    """Return the inputs and outputs of a linear layer, and whether it has a bias."""
    weight, bias = _parameters_of(module)
    inputs, outputs = weight.shape if input_first else reversed(weight.shape)
    return inputs, outputs, bias is not None


@eager
def column(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int | None,
           products: Products) -> Tensor:
    """Return this rank's slice (..., rows) of x W^T + b, where `weight` (rows, in) and `bias` (rows,) are its slices.

    `x` (..., in) is whole; or split along `dim`, in which case it is gathered, and gathered again in backward, not kept.
    """
    return cast(Tensor, _ColumnProduct.apply(*_in_one_dtype(x, weight, bias), axis, dim, products))


@eager
def row(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int | None, products: Products) -> Tensor:
    """Return x W^T + b (..., out), whole or split along `dim`, from this rank's slices of `x` (..., in) and W (out, in)."""
    return cast(Tensor, _RowProduct.apply(*_in_one_dtype(x, weight, bias), axis, dim, products))


_SLICED = "a product over the ranks of a tensor axis", "take a mesh without tensor ranks"


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int | None,
                products: Products) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.dim, ctx.deferral = axis, dim, _WeightGradDeferral.of(x, weight, bias)
        ctx.products = products
        return products.linear(x if dim is None else gathered(x, axis, dim), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        check_first_derivative(*_SLICED)
        x, weight = ctx.saved_tensors
        axis, dim = ctx.axis, ctx.dim
        wants_x, wants_weight, wants_bias = _wanted(ctx)
        if ctx.deferral is not None:
            ctx.deferral.defer(lambda: x if dim is None else joined(axis.all_gather(x.contiguous()), dim), x.shape[-1],
                               gradient)
            wants_weight = wants_bias = False
        x_gradient = weight_gradient = bias_gradient = None
        whole = axis.all_gather(x.contiguous()) if wants_weight and dim is not None else None
        sum_of_x = summed(ctx.products.gradient_of_input(gradient, weight), axis, dim) if wants_x else None
        flat = _rows(gradient)
        if wants_weight:
            x = x if whole is None else joined(whole, ctx.dim)
            weight_gradient = ctx.products.gradient_of_weight(flat, _rows(x))
        if wants_bias:
            bias_gradient = flat.sum(0)
        if sum_of_x is not None:
            x_gradient = sum_of_x.wait()
        return x_gradient, weight_gradient, bias_gradient, None, None, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int | None,
                products: Products) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.dim, ctx.deferral = axis, dim, _WeightGradDeferral.of(x, weight, bias)
        ctx.products = products
        addend = products.linear(x, weight, bias if axis.rank == 0 else None)  # added once, before anything is rounded
        return summed(addend, axis, dim).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        check_first_derivative(*_SLICED)
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = _wanted(ctx)
        if ctx.dim is not None:
            gradient = gathered(gradient, ctx.axis, ctx.dim)
        if ctx.deferral is not None:
            ctx.deferral.defer(lambda: x, x.shape[-1], gradient)
            wants_weight = wants_bias = False
        flat = _rows(gradient)
        x_gradient = ctx.products.gradient_of_input(gradient, weight) if wants_x else None
        weight_gradient = ctx.products.gradient_of_weight(flat, _rows(x)) if wants_weight else None
        bias_gradient = flat.sum(0) if wants_bias else None  # of the whole gradient: the same on every rank
        return x_gradient, weight_gradient, bias_gradient, None, None, None


@dataclass(frozen=True, slots=True)
class _WeightGradDeferral:
    """Weights whose gradients are computed in a later pass of the schedule, from `queue`."""

    queue: WeightGradQueue
    weights: tuple[Tensor, ...]

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor | None) -> Self | None:
        """Return the deferral for a product with `x`; None where the weight gradients are computed in the same backward."""
        queue = current_queue()
        if queue is None or not weight.requires_grad or not queue.accepts(x, weight, bias):
            return None
        return cls(queue, (weight,) if bias is None else (weight, bias))

    def defer(self, x: Callable[[], Tensor], inputs: int, gradient: Tensor) -> None:
        """Queue the operands of the weight gradients."""
        self.queue.add(WeightGradTask(self.weights, gradient, inputs, x))


def _in_one_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast does for a matrix product, outside of the node, so that its backward sees the same dtypes."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _rows(tensor: Tensor) -> Tensor:
    """View (..., n) as rows of n."""
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.unsqueeze(0)


def _wanted(ctx: Any) -> list[bool]:
    """Return for x, weight and bias whether the current backward pass needs the gradient."""
    tensors = zip(ctx.needs_input_grad[:3], ctx.next_functions, strict=False)  # a bias of None has no edge
    wanted = [needed and is_reached(edge) for needed, (edge, _) in tensors]
    return [*wanted, False][:3]
