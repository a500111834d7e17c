"""Attention on a device copies the tables of a layout up once: later calls neither copy nor read anything."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.attention import Blocks, FixedSparsityConfig, attend
from shoal.device import HOST, current_device, kept_for_stream
from shoal.sequence_parallel.attention import attend_sequence
from shoal.sequence_parallel.axis import SequenceAxis
from shoal.testing import ranks_on, run_ranks
from tests.late.device import load
from tests.late.ranks import prepare

_aten = torch.ops.aten
_INDEXED = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default)
_READS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default)


class _Crossings(TorchDispatchMode):
    """Notes the operators that copy from the host to the device, and those by which the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0].device if args and isinstance(args[0], Tensor) else HOST
        up = ((func is _aten._to_copy.default and first == HOST and str(kwargs.get("device", HOST)) != "cpu")
              or (func is _aten.copy_.default and first != HOST and args[1].device == HOST)
              or (func is _aten.lift_fresh.default and first != HOST))
        hidden = func in _INDEXED and first != HOST and any(
            each is not None and (each.device == HOST or each.dtype == torch.bool) for each in args[1])
        if up or hidden or (func in _READS and first != HOST):
            self.found.append(str(func))
        return func(*args, **kwargs)


def _layout(heads: int, size: int) -> Tensor:
    layout = torch.rand(heads, size, size, generator=torch.Generator().manual_seed(heads)) < 0.4
    return (layout | torch.eye(size, dtype=torch.bool)).long()


def _operands(heads: int, kv_heads: int, length: int) -> list[Tensor]:
    generator, device = torch.Generator().manual_seed(0), current_device()
    return [torch.randn(2, each, length, 16, generator=generator).to(device).requires_grad_()
            for each in (heads, kv_heads, kv_heads)]


def _gathered(heads: int, biased: bool, dropout: float) -> tuple[list[list[str]], list[Tensor]]:
    """Return the crossings of a first and a second attention, and the output and gradients of the second."""
    blocks, leaves = Blocks.of(_layout(heads, 8), 16), _operands(4, 4, 128)
    bias = torch.randn(1, 4, 128, 128, generator=torch.Generator().manual_seed(1)).to(current_device())
    bias = bias.requires_grad_() if biased else None
    given = leaves if bias is None else [*leaves, bias]
    crossings: list[list[str]] = []
    results: list[Tensor] = []
    for _ in range(2):
        with _Crossings() as found:
            output = attend(*leaves, blocks, causal=True, bias=bias, dropout=dropout, seed=1, backend="gather")
            results = [output.detach(), *torch.autograd.grad(output.square().sum(), given)]
        crossings.append(found.found)
    return crossings, [each.cpu() for each in results]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_by_torch_operations_copies_its_tables_once(heads: int, biased: bool, dropout: float) -> None:
    [(_, expected)] = run_ranks(1, _gathered, heads, biased, dropout)
    with ranks_on(prepare):
        [((first, second), found)] = run_ranks(1, _gathered, heads, biased, dropout)
    assert first and second == []
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _exchanged(exchange: Literal["heads", "blocks"], heads: int, kv_heads: int) -> list[list[str]]:
    group = dist.group.WORLD
    assert group is not None
    axis, leaves = SequenceAxis(group), _operands(heads, kv_heads, 64)
    blocks = Blocks.of(_layout(1, 8), 16) if exchange == "blocks" else Blocks.dense(128, 128, 16)
    crossings: list[list[str]] = []
    for _ in range(2):
        with _Crossings() as found:
            output = attend_sequence(*leaves, axis, blocks, causal=True, exchange=exchange, backend="gather")
            output.backward(torch.ones_like(output))
        crossings.append(found.found)
    return crossings


@pytest.mark.parametrize(("exchange", "heads", "kv_heads"), [("heads", 4, 4), ("heads", 6, 3), ("blocks", 4, 2)])
def test_a_sequence_axis_copies_its_tables_once(exchange: Literal["heads", "blocks"], heads: int, kv_heads: int) -> None:
    with ranks_on(prepare):
        for first, second in run_ranks(2, _exchanged, exchange, heads, kv_heads):
            assert first and second == []


@kept_for_stream
def _table(device: torch.device, size: int) -> Tensor:
    return torch.arange(size, device="cpu").to(device)


def _by_stream() -> list[bool]:
    device = load()
    first, again = _table(device, 4), _table(device, 4)
    with torch.Stream(device), torch.inference_mode():
        other = _table(device, 4)
    return [first is again, first is other, other.is_inference()]


def test_every_stream_has_tables_of_its_own() -> None:
    with ranks_on(prepare):
        assert run_ranks(1, _by_stream) == [[True, False, False]]


def _looked_at() -> tuple[list[str], bool]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    from shoal.attention.hugging_face import register

    register(FixedSparsityConfig(4), name="late")
    padding = torch.ones(2, 32, dtype=torch.int64, device=load())
    with _Crossings() as found:
        mask = ALL_MASK_ATTENTION_FUNCTIONS["late"](batch_size=2, q_length=32, kv_length=32, attention_mask=padding)
    return found.found, mask is not None


def test_no_forward_waits_to_see_whether_there_is_padding() -> None:
    pytest.importorskip("transformers")
    with ranks_on(prepare):
        assert run_ranks(1, _looked_at) == [([], True)]
