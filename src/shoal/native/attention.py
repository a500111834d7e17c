"""Block-sparse attention of fp32 tensors in host memory, forward and backward (attention.cpp).

Blocks and head dims are multiples of 16. Keys and values are contiguous (batches, kv_heads, kv_length, dim); queries,
outputs and the output's gradient have any strides but the last, which is 1.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.native.build import load

__all__ = ["UNIT", "KernelCall", "available", "backward", "forward"]

UNIT = 16
"""Blocks and head dims are multiples of it."""
_VERSION = 3
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}
_TERMS = 3


class _Term(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64),
                ("dtype", ctypes.c_int32), ("multiplies", ctypes.c_int32)]


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batches", "heads", "kv_heads", "length", "kv_length", "dim", "block",
                                              "layout_heads")),
        ("starts", ctypes.c_void_p), ("columns", ctypes.c_void_p), ("row_places", ctypes.c_void_p),
        ("column_places", ctypes.c_void_p), ("first_head", ctypes.c_int64), ("hidden", ctypes.c_void_p),
        ("hidden_batch", ctypes.c_int64), ("hidden_row", ctypes.c_int64),
        ("terms", _Term * _TERMS), ("term_count", ctypes.c_int32), ("causal", ctypes.c_int32),
        ("scale", ctypes.c_float), ("kept", ctypes.c_float), ("threshold", ctypes.c_uint32), ("seed", ctypes.c_uint32 * 2),
        ("threads", ctypes.c_int32),
        ("query", ctypes.c_void_p), ("key", ctypes.c_void_p), ("value", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64 * 3), ("output_stride", ctypes.c_int64 * 3), ("gradient_stride", ctypes.c_int64 * 3),
        ("output", ctypes.c_void_p), ("sums", ctypes.c_void_p), ("gradient", ctypes.c_void_p),
        ("query_gradient", ctypes.c_void_p), ("key_gradient", ctypes.c_void_p), ("value_gradient", ctypes.c_void_p),
        ("score_gradient", ctypes.c_void_p), ("visited", ctypes.c_int64),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """The facts of a call, the same forward and backward; `shoal.attention.call` says what they mean."""

    starts: Tensor
    columns: Tensor
    row_places: Tensor | None
    column_places: Tensor | None
    first_head: int
    layout_heads: int
    block: int
    hidden: Tensor | None
    terms: Sequence[tuple[Tensor, bool]]
    """Each (batch or 1, heads or 1, queries or 1, keys), and whether its zeros hide scores instead of being added."""
    causal: bool
    scale: float
    kept: float
    threshold: int
    seed: int


def available() -> bool:
    """Whether the library can be built and loaded here; the first call builds it."""
    library = load("attention")
    return library is not None and library.shoal_attention_version() == _VERSION


def forward(call: KernelCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, laid out as `query` is, and the log-sum-exp (batches, heads, length) of every row."""
    output = torch.empty_like(query)
    if output.stride(-1) != 1:  # of a query whose memory overlaps, as that of windows by `unfold`
        output = query.new_empty(query.shape)
    sums = query.new_empty(query.shape[:3])
    problem = _problem(call, query, key, value, output, sums)
    _run("forward", problem)
    return output, sums


def backward(call: KernelCall, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor, gradient: Tensor, *,
             score_gradient: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    `score_gradient` (batches, heads, visited blocks of a head, block, block), zeros, receives the gradient of the scores
    after the scale.
    """
    gradients = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    names = ("query_gradient", "key_gradient", "value_gradient")
    _run("backward", _problem(
        call, query, key, value, output, sums,
        gradient=gradient.data_ptr(), gradient_stride=_strides(gradient),
        score_gradient=None if score_gradient is None else score_gradient.data_ptr(),
        visited=0 if score_gradient is None else score_gradient.shape[2],
        **{name: each.data_ptr() for name, each in zip(names, gradients, strict=True)}))
    return gradients


def _run(name: str, problem: _Problem) -> None:
    library = load("attention")
    assert library is not None
    if getattr(library, f"shoal_attention_{name}")(ctypes.byref(problem)):
        raise MemoryError(f"attention: no memory for the scratch space of {problem.threads} threads")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _strides(tensor: Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 3)(*tensor.stride()[:3])


def _problem(call: KernelCall, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor,
             **of_backward: Any) -> _Problem:
    for tensor in (query, key, value, output):
        assert tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.stride(-1) == 1
    assert key.is_contiguous() and value.is_contiguous() and key.shape == value.shape
    assert call.block % UNIT == 0 and query.shape[-1] % UNIT == 0
    hidden = call.hidden
    terms = (_Term * _TERMS)(*(_term(*each) for each in call.terms))
    return _Problem(
        batches=query.shape[0], heads=query.shape[1], kv_heads=key.shape[1], length=query.shape[2], kv_length=key.shape[2],
        dim=query.shape[3], block=call.block, layout_heads=call.layout_heads,
        starts=call.starts.data_ptr(), columns=call.columns.data_ptr(), row_places=_address(call.row_places),
        column_places=_address(call.column_places), first_head=call.first_head,
        hidden=_address(hidden),
        hidden_batch=0 if hidden is None or hidden.shape[0] == 1 else hidden.stride(0),
        hidden_row=0 if hidden is None or hidden.shape[1] == 1 else hidden.stride(1),
        terms=terms, term_count=len(call.terms), causal=call.causal, scale=call.scale, kept=call.kept,
        threshold=call.threshold, seed=(ctypes.c_uint32 * 2)(call.seed & 0xFFFFFFFF, call.seed >> 32 & 0xFFFFFFFF),
        threads=torch.get_num_threads(), query=query.data_ptr(), key=key.data_ptr(), value=value.data_ptr(),
        query_stride=_strides(query), output_stride=_strides(output), output=output.data_ptr(), sums=sums.data_ptr(),
        **of_backward)


def _term(tensor: Tensor, multiplies: bool) -> _Term:
    assert tensor.stride(-1) == 1 and tensor.dtype in _DTYPES
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    return _Term(tensor.data_ptr(), *strides, _DTYPES[tensor.dtype], multiplies)
