"""`attend`: the one operation, its checks, and the choice of a backend.

    reference   dense scores and autograd: the oracle of the tests
    gather      torch operations on any device; blocks and head dims of any size
    native      C++ on the host; blocks are multiples of 16
    flex        torch's flex_attention, compiled on an accelerator; blocks that divide 128 or are multiples of it, without
                dropout and bias
    triton      Triton kernels on an accelerator that it compiles for; blocks of 16, 32 or 64, tiles of at most 16 KiB

"auto" takes native on the host where it serves, triton on an accelerator where it serves and agrees with gather, and gather
elsewhere; flex runs where it is asked for.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from math import sqrt
from numbers import Real
from operator import index
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from shoal.attention import flex, gather, reference
from shoal.attention.arguments import check_tensor, in_memory, true_or_false, whole_number
from shoal.attention.blocks import Blocks
from shoal.attention.call import AttentionCall, Term, in_rows
from shoal.attention.masks import Mode, any_hidden, check_mode, for_backward, hidden_blocks, mask_term
from shoal.autograd import check_first_derivative, in_function_transform, in_trace, isolated, kept_result, needs_operators
from shoal.device import HOST, has_triton, kept_for_stream
from shoal.errors import UsageError
from shoal.log import warn_once
from shoal.native import attention as native

__all__ = ["BACKENDS", "Backend", "Kernels", "attend", "check_options", "kernels_for", "of_one_dtype", "scale_of"]

Backend = Literal["auto", "reference", "gather", "native", "flex", "triton"]
_LARGEST = torch.finfo(torch.float32).max
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "gather", "native", "flex", "triton")


_F = TypeVar("_F", bound=Callable[..., Tensor])


def _outside_graphs(function: _F) -> _F:
    """Let torch.compile break its graph at a call, but for the reference: kernels take the addresses of tensors."""
    eager = cast("_F", torch.compiler.disable(
        function, reason="block-sparse attention computes outside graphs of torch.compile; only backend='reference' is part "
                         "of a graph"))

    @wraps(function)
    def chosen(*operands: Any, **options: Any) -> Tensor:
        return (function if options.get("backend") == "reference" else eager)(*operands, **options)

    return cast("_F", chosen)


@_outside_graphs
def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, *, scale: float | None = None, causal: bool = False,
           key_padding: Tensor | None = None, key_padding_mode: Mode = "add", mask: Tensor | None = None,
           mask_mode: Mode = "add", bias: Tensor | None = None, dropout: float = 0.0, seed: int | None = None,
           first_head: int = 0, backend: Backend = "auto") -> Tensor:
    """Return softmax(scale * query key^T + masks) value over the visited `blocks`: (batches, heads, length, value dim).

    `query` is (batches, heads, length, dim); `key` and `value` are (batches, kv_heads, kv_length, dim), where kv_heads
    divides heads and query head h reads key head h // (heads / kv_heads). Values may have a dim of their own. All have one
    dtype, of 16 or 32 bits. `scale` is 1 / sqrt(dim) unless given. With `causal`, a query sees no later key; the queries of
    `Blocks.part` are those of its rows.

    `key_padding` (batches, kv_length) and `mask` (length, kv_length) are added to the scores ("add"); or hide keys where
    they are 0 ("mul"). A mask of dtype bool hides where it is False. `bias` (batches or 1, heads or 1, length, kv_length),
    or without the first or the first two of these, is added to the scores, and has a gradient. An added value of -65504 or
    less hides its key as -inf does.

    `dropout` is the probability with which an attention probability is set to zero. `seed` determines which ones (drawn
    from torch's generator of the host unless given). `first_head` is the number of the first of these heads in the whole
    attention, where these are some of its heads. A row that sees nothing gives zeros, and zero gradients.

    Under autocast, operands of different float dtypes take the one of autocast, as those of torch's attention do.

    Raises UsageError for shapes, dtypes, devices or masks that do not fit each other; and, but for backend "reference", for
    tensors without memory of their own, such as a DTensor.
    """
    query, key, value = of_one_dtype("attend", query, key, value)
    causal = true_or_false("attend: causal", causal)
    _check(query, key, value, blocks, causal=causal, backend=backend)
    check_options("attend", query.dtype, dropout=dropout, seed=seed, first_head=first_head, backend=backend)
    if backend != "reference":
        query, key, value, key_padding, mask, bias = in_memory(
            "attend", query=query, key=key, value=value, key_padding=key_padding, mask=mask, bias=bias)
    scale = scale_of(scale, query.shape[-1])
    if causal and backend != "reference":  # the reference hides by position, and may run where no layout can be made
        blocks = blocks.lower
    bias = None if bias is None else _bias(bias, query, key)
    terms = [] if bias is None else [Term(tensor=bias, multiplies=False)]
    hidden: list[Tensor] = []
    masks: tuple[tuple[str, Tensor | None, Mode, int], ...] = (
        ("key_padding", key_padding, key_padding_mode, query.shape[0]), ("mask", mask, mask_mode, query.shape[2]))
    traced = backend == "reference" and needs_operators()
    for name, tensor, mode, first in masks:
        check_mode(name, mode)
        if tensor is not None:
            term = mask_term(name, tensor, mode, (first, key.shape[2]), query.device, traced=traced)
            terms.append(term)
            if not traced:
                hidden.append(hidden_blocks(name, term, blocks))
    if dropout and seed is None:
        seed = int(torch.randint(2**62, (), device="cpu").item())
    call = AttentionCall(blocks=blocks, heads=query.shape[1], scale=scale, causal=causal, terms=tuple(terms),
                         biased=bias is not None, dropout=dropout, seed=index(seed or 0), hidden=any_hidden(hidden),
                         first_head=index(first_head))
    chosen = _choose(backend, call, query, key, value)
    if not query.shape[0]:
        return _of_no_batch(query, key, value, bias)
    if chosen in _WHOLE:
        return _WHOLE[chosen](call, query, key, value, bias)
    return _Attend.apply(_TABLE[chosen], call, query, key, value, bias)


def _of_no_batch(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of an empty batch, whose gradients are zeros: kernels and views cannot divide by its 0 elements."""
    operands = (query, key, value) if bias is None else (query, key, value, bias)
    nothing = sum((each[..., :0].sum() for each in operands), query.new_zeros(()))
    return query.new_zeros(*query.shape[:3], value.shape[3]) + nothing.to(query.dtype)


class _Forward(Protocol):
    def __call__(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...


class Kernels(NamedTuple):
    """A backend: output and log-sum-exp forward; fp32 gradients of query, key and value backward."""

    forward: _Forward
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class _Attend(torch.autograd.Function):
    """The operation for autograd: saves operands, output and log-sum-exp, and lets a backend compute both passes."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor,
                bias: Tensor | None) -> Tensor:
        """Run the backend's forward; `bias` is the first of the call's terms."""
        output, sums = kept_result(lambda: kernels.forward(call, query, key, value))
        terms = tuple(term.tensor for term in call.terms)
        ctx.save_for_backward(query, key, value, output, sums, *terms)
        ctx.kernels, ctx.call, ctx.has_bias = kernels, replace(call, terms=()), bias is not None
        ctx.multiplies = tuple(term.multiplies for term in call.terms)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backend's backward, and sum the scores' gradient to the shape of the bias."""
        check_first_derivative("block-sparse attention", "take backend='reference', which has all scores in memory; where "
                               "layers were injected, call restore_transformer_layers(model)", gradient)
        query, key, value, output, sums, *terms = ctx.saved_tensors
        call = replace(ctx.call, terms=tuple(Term(tensor=tensor, multiplies=multiplies)
                                                   for tensor, multiplies in zip(terms, ctx.multiplies, strict=True)))
        blocks = call.blocks
        wanted = ctx.has_bias and ctx.needs_input_grad[5]
        scores = None
        if wanted:
            visited = blocks.visited if blocks.heads == 1 else int(blocks.starts[::blocks.row_blocks].diff().max())
            scores = torch.zeros(*query.shape[:2], visited, blocks.block, blocks.block, dtype=torch.float32,
                                 device=query.device)
        gradients = ctx.kernels.backward(call, query, key, value, output, sums, gradient, score_gradient=scores)
        typed = [each.to(operand.dtype) for each, operand in zip(gradients, (query, key, value), strict=True)]
        to_bias = None if scores is None else _spread(scores, blocks, terms[0])
        return None, None, *typed, to_bias


def _spread(scores: Tensor, blocks: Blocks, bias: Tensor) -> Tensor:
    """Return the gradient of `bias` from that of the visited scores (batches, heads, visited, block, block)."""
    if bias.shape[0] == 1:
        scores = scores.sum(0, keepdim=True)
    result = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    cut = result.unflatten(2, (blocks.row_blocks, blocks.block)).unflatten(4, (blocks.column_blocks, blocks.block))
    cells = _cells(bias.device, blocks)
    for head in range(scores.shape[1]):
        rows, columns = cells[0 if blocks.heads == 1 else head]
        to = cut[:, 0 if bias.shape[1] == 1 else head]  # batches, row blocks, block, column blocks, block
        to.permute(1, 3, 0, 2, 4).index_put_((rows, columns), scores[:, head, :len(rows)].transpose(0, 1), accumulate=True)
    return result.to(bias.dtype)


@kept_for_stream
def _cells(device: torch.device, blocks: Blocks) -> list[tuple[Tensor, Tensor]]:
    """Return by layout head the rows and the columns of its visited blocks, int64 on `device`."""
    ends = blocks.starts[::blocks.row_blocks].tolist()
    return [((blocks.rows[first:last] - head * blocks.row_blocks).to(device), blocks.columns[first:last].long().to(device))
            for head, (first, last) in enumerate(pairwise(ends))]


# --- Backends ---

def _kernel_call(call: AttentionCall) -> native.KernelCall:
    blocks = call.blocks
    return native.KernelCall(
        starts=blocks.starts, columns=blocks.columns, row_places=blocks.row_places, column_places=blocks.column_places,
        first_head=call.first_head, layout_heads=blocks.heads, block=blocks.block, hidden=call.hidden,
        terms=[(in_rows(term.tensor), term.multiplies) for term in call.terms],
        causal=call.causal, scale=call.scale, kept=call.kept, threshold=call.threshold, seed=call.seed)


def _widen(tensor: Tensor) -> Tensor:
    """Return `tensor` in fp32, in rows, with a head dim of the kernel."""
    missing = -tensor.shape[-1] % native.UNIT
    wide = torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
    return in_rows(wide.float())


def _narrow(tensor: Tensor, dim: int) -> Tensor:
    """Return the first `dim` columns; no view where these are all, which autograd would let nobody write to."""
    return tensor if tensor.shape[-1] == dim else tensor[..., :dim]


def _native_forward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = (_widen(each).contiguous() for each in (key, value))
    output, sums = native.forward(_kernel_call(call), _widen(query), keys, values)
    return _narrow(output, query.shape[-1]).to(query.dtype), sums


def _native_backward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor,
                     gradient: Tensor, *, score_gradient: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    wide = _widen(query)
    like = _widen(output)
    keys, values = (_widen(each).contiguous() for each in (key, value))
    gradients = native.backward(_kernel_call(call), wide, keys, values, like, sums.contiguous(), _widen(gradient),
                                score_gradient=score_gradient)
    dim = query.shape[-1]
    return _narrow(gradients[0], dim), _narrow(gradients[1], dim), _narrow(gradients[2], dim)


def _triton() -> Any:
    return import_module("shoal.attention.triton_kernels")  # importing Triton takes a second, and it may be absent


def _triton_forward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _triton().forward(call, query, key, value)
    return result


def _triton_backward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor,
                     gradient: Tensor, *, score_gradient: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = _triton().backward(call, query, key, value, output, sums, gradient,
                                                               score_gradient=score_gradient)
    return result


_TABLE = MappingProxyType({"gather": Kernels(gather.forward, gather.backward),
                           "native": Kernels(_native_forward, _native_backward),
                           "triton": Kernels(_triton_forward, _triton_backward)})


def _reference(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    return reference.attention(call, query, key, value, bias)[0]


_WHOLE = MappingProxyType({"reference": _reference, "flex": flex.attention})
"""Backends that autograd follows by itself."""


def _choose(backend: Backend, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> str:
    served = query.device == HOST and call.blocks.block % native.UNIT == 0 and value.shape[-1] == query.shape[-1]
    if backend == "native":
        if not served:
            raise UsageError("attend: the native backend takes tensors on the host, blocks that are multiples of "
                             f"{native.UNIT}, and values as wide as keys; got device {query.device}, block "
                             f"{call.blocks.block}, head dims {query.shape[-1]} and {value.shape[-1]}. Use backend='gather'")
        if not native.available():
            raise UsageError("attend: the native backend cannot be built here (a warning says why); use backend='gather'")
    if backend == "flex":
        _check_flex(call, query, key, value)
    if backend == "triton":
        _check_triton(call, query, value)
    if backend != "auto":
        return backend
    if query.device != HOST:
        if not has_triton(query.device):
            lack = f"Triton does not compile for {query.device.type}"
        elif find_spec("triton") is None:
            lack = "the package triton is not installed"
        else:
            lack = _triton_refuses(call, query, value)
        if lack:
            warn_once(f"attention on {query.device} is computed by torch operations: {lack}")
        return "gather" if lack or not _triton_agrees(query.device) else "triton"
    if served and native.available():
        return "native"
    if served:
        warn_once("attention is computed by torch operations: the C++ kernel could not be built")
    elif call.blocks.block % native.UNIT:
        warn_once(f"attention with blocks of {call.blocks.block} is computed by torch operations: the C++ kernel takes "
                  f"multiples of {native.UNIT}")
    else:
        warn_once(f"attention with values of dim {value.shape[-1]} and keys of dim {query.shape[-1]} is computed by torch "
                  f"operations: the C++ kernel takes values as wide as keys")
    return "gather"


def _check_flex(call: AttentionCall, *operands: Tensor) -> None:
    if call.threshold or call.biased or not flex.serves(call.blocks):
        raise UsageError("attend: the flex backend has no dropout and no bias, and takes blocks that divide 128 or are "
                         f"multiples of it; got dropout {call.dropout:g}, {'a' if call.biased else 'no'} bias, block "
                         f"{call.blocks.block}. Use backend='gather'")
    if operands[0].device == HOST and torch.is_grad_enabled() and any(each.requires_grad for each in operands):
        raise UsageError("attend: the flex backend has no backward on the host; use backend='native' or 'gather'")


_TRITON_BLOCKS = (16, 32, 64)
_TRITON_TILE = 64 * 64 * 4
"""The most bytes of a tile, a block of rows by the head dim: larger ones do not fit the shared memory of every GPU."""


def _triton_refuses(call: AttentionCall, query: Tensor, value: Tensor) -> str | None:
    """Return why the Triton kernels do not compute this call, None where they do."""
    tile = call.blocks.block * query.shape[-1] * query.element_size()
    if call.blocks.block in _TRITON_BLOCKS and value.shape[-1] == query.shape[-1] and tile <= _TRITON_TILE:
        return None
    return (f"Triton's kernels take blocks of 16, 32 or 64, equal head dims of keys and values, and block * head dim * "
            f"bytes of an element up to {_TRITON_TILE}; got block {call.blocks.block}, head dims {query.shape[-1]} and "
            f"{value.shape[-1]}, {query.dtype}")


def _check_triton(call: AttentionCall, query: Tensor, value: Tensor) -> None:
    refusal = _triton_refuses(call, query, value)
    if refusal:
        raise UsageError(f"attend: {refusal}. Use backend='gather'")
    if find_spec("triton") is None:
        raise UsageError("attend: backend='triton' needs the package triton, which is not installed; use backend='gather'")
    if not has_triton(query.device) and not _triton().INTERPRETED:
        raise UsageError(f"attend: Triton does not compile for {query.device.type}; use backend='auto'. (With "
                         "TRITON_INTERPRET=1 in the environment its interpreter runs the kernels on the host, slowly)")


@cache
def _triton_agrees(device: torch.device) -> bool:
    """Return whether Triton compiles here and gives the numbers of gather, by one small call; warn where it does not."""
    blocks = Blocks.of(torch.ones(1, 2, 2, dtype=torch.bool, device="cpu").tril(), 16)
    generator = torch.Generator().manual_seed(0)
    results: list[list[Tensor]] = []
    try:
        with isolated(device):
            operands = [torch.randn(1, 2, 32, 16, dtype=torch.float32, device="cpu", generator=generator).to(device)
                        for _ in range(4)]
            for backend in ("gather", "triton"):
                query, key, value = (each.clone().requires_grad_() for each in operands[:3])
                output = attend(query, key, value, blocks, dropout=0.5, seed=1, causal=True, backend=backend)
                results.append([output, *torch.autograd.grad(output, (query, key, value), operands[3])])
            largest = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    except Exception as error:  # a compiler fails in many ways
        warn_once(f"attention on {device} is computed by torch operations: Triton's kernels failed: {error}")
        return False
    if not largest < 1e-3:
        warn_once(f"attention on {device} is computed by torch operations: Triton's kernels differ from them by {largest:g}")
    return largest < 1e-3


def kernels_for(backend: Backend, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Kernels:
    """Return the backend that computes `call`, one with a backward of its own. Raises UsageError for one that cannot."""
    chosen = _choose(backend, call, query, key, value)
    if chosen not in _TABLE:
        raise UsageError(f"attend: the backend '{chosen}' computes whole sequences alone; choose among auto, "
                         f"{', '.join(_TABLE)} on a sequence axis")
    return _TABLE[chosen]


# --- Checks ---

def of_one_dtype(name: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return operands of different float dtypes in the one of autocast, where it is on; others as they are.

    Raises UsageError for what is no dense tensor.
    """
    for operand, given in (("query", query), ("key", key), ("value", value)):
        check_tensor(f"{name}: {operand}", given, "(batches, heads, length, dim)")
    dtypes = {each.dtype for each in (query, key, value)}
    if len(dtypes) == 1 or not dtypes <= _DTYPES or not torch.is_autocast_enabled(query.device.type):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def check_options(name: str, dtype: torch.dtype, *, dropout: object, seed: object, first_head: object,
                  backend: str) -> None:
    """Raise UsageError for a dtype of operands, a dropout, a seed, a first head or a backend that no attention takes."""
    if dtype not in _DTYPES:
        raise UsageError(f"{name}: operands are float32, bfloat16 or float16; got {dtype}")
    if not isinstance(dropout, Real) or not 0.0 <= float(dropout) < 1.0:
        raise UsageError(f"{name}: dropout is a probability, at least 0 and below 1; got {dropout!r}")
    if seed is not None:
        whole_number(f"{name}: seed", seed, "a whole number, or None")
    whole_number(f"{name}: first_head", first_head, "the number of a head, from 0", least=0)
    if backend not in BACKENDS:
        raise UsageError(f"{name}: backend is one of {', '.join(BACKENDS)}; got {backend!r}")


def _shapes(named: Mapping[str, Tensor]) -> str:
    """Return the shapes as text, for an error alone: dynamo traces no text of sizes that vary."""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named.items())


def _check(query: Tensor, key: Tensor, value: Tensor, blocks: object, *, causal: bool, backend: str) -> None:
    """Raise UsageError where operands do not fit each other or the layout."""
    if not isinstance(blocks, Blocks):
        raise UsageError(f"attend: blocks are those of a layout, of class Blocks; got {type(blocks).__name__}: give "
                         f"Blocks.of(layout, block), or config.blocks(length)")
    named = {"query": query, "key": key, "value": value}
    if any(tensor.dim() != 4 for tensor in named.values()):
        raise UsageError(f"attend: operands are (batches, heads, length, dim); got {_shapes(named)}")
    if len({(tensor.dtype, tensor.device) for tensor in named.values()}) > 1:
        raise UsageError("attend: query, key and value have one dtype, and one device; got "
                         + ", ".join(f"{name} {tensor.dtype} on {tensor.device}" for name, tensor in named.items()))
    if not all((query.shape[1], key.shape[1], query.shape[3], value.shape[3])):
        raise UsageError(f"attend: operands have at least one head, and head dims of at least 1; got {_shapes(named)}")
    if (key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]
            or query.shape[1] % key.shape[1]):
        raise UsageError("attend: key and value have one length and one number of heads, which divides that of the query; "
                         f"all have one batch, query and key one head dim; got {_shapes(named)}")
    if blocks.heads != 1 and blocks.heads != query.shape[1]:
        raise UsageError(f"attend: the layout is for {blocks.heads} heads, query has {query.shape[1]}; make a layout with 1 "
                         f"or {query.shape[1]} heads")
    for name, length, expected in (("query", query.shape[2], blocks.length), ("key", key.shape[2], blocks.kv_length)):
        if length != expected:
            fix = (f"pad it to a multiple of the block, {blocks.block}" if length % blocks.block
                   else f"make the layout for length {length}")
            raise UsageError(f"attend: {name} has length {length}, the layout is for {expected}; {fix}")
    if causal and blocks.row_places is None and blocks.length != blocks.kv_length:
        raise UsageError(f"attend: causal needs equal lengths of query and key; got {blocks.length} and {blocks.kv_length}")
    if backend != "reference" and (in_function_transform() or in_trace()):  # a trace would keep the masks of its example
        raise UsageError("attend: within a transform of torch.func, in forward mode, and where torch.export, make_fx or "
                         "torch.jit.trace records operators, only backend='reference' computes; "
                         f"got backend={backend!r}. It has all scores in memory")


def _bias(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the bias with four dims, in a dtype that kernels read; raise UsageError where it does not fit."""
    check_tensor("attend: bias", bias, "(batches or 1, heads or 1, length, kv_length)")
    whole = (*query.shape[:3], key.shape[2])
    wide = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape)) if 2 <= bias.dim() <= 4 else bias
    fits = wide.dim() == 4 and wide.shape[2:] == whole[2:] and all(  # by ==: dynamo traces no `in` of sizes that vary
        wide.shape[dim] == 1 or wide.shape[dim] == whole[dim] for dim in range(2))
    if not fits or not bias.is_floating_point() or bias.device != query.device:
        raise UsageError(f"attend: bias is (batches or 1, heads or 1, length, kv_length), here {whole}, of a float dtype on "
                         f"{query.device}; got {tuple(bias.shape)}, {bias.dtype}, {bias.device}")
    wide = (wide if wide.dtype in _DTYPES else wide.float()).resolve_neg()
    return for_backward(wide if wide.stride(-1) == 1 else wide.contiguous())


def scale_of(scale: float | None, dim: int) -> float:
    """Return the scale of scores, by default 1 / sqrt(dim). Raises UsageError for one that is no finite number."""
    if scale is not None and not (isinstance(scale, Real) and abs(float(scale)) <= _LARGEST):  # pyright: ignore
        raise UsageError(f"attend: scale is a finite number of fp32; got {scale!r}: leave it out for 1 / sqrt(head dim)")
    return 1.0 / sqrt(dim) if scale is None else scale
