"""What backward reads: hooks on saved tensors may give it back with other strides, and one gradient comes at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shoal.attention import BigBirdSparsityConfig, Blocks, attend
from shoal.errors import NotServed

LENGTH = 128


def restrided(tensor: Tensor) -> Tensor:
    """Return equal values whose last two dims have each other's order in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() > 2 else tensor


@pytest.mark.parametrize("backend", ["native", "gather", "reference"])
def test_saved_tensors_may_come_back_with_other_strides(backend: Any) -> None:
    torch.manual_seed(0)
    blocks = BigBirdSparsityConfig(4, 16).blocks(LENGTH)
    leaves = [torch.randn(2, 4, LENGTH, 16, requires_grad=True) for _ in range(3)]
    bias = torch.randn(4, LENGTH, LENGTH, requires_grad=True)
    padding = torch.rand(2, LENGTH) > 0.2

    def gradients() -> tuple[Tensor, ...]:
        output = attend(*leaves, blocks, bias=bias, key_padding=padding, dropout=0.1, seed=3, backend=backend)
        return torch.autograd.grad(output.square().sum(), (*leaves, bias))

    expected = gradients()
    with saved_tensors_hooks(lambda tensor: tensor, restrided):
        computed = gradients()
    for got, wanted in zip(computed, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_several_gradients_at_once_are_refused_but_by_the_reference() -> None:
    blocks = Blocks.dense(64, 64, 16)
    gradients = torch.ones(3, 1, 2, 64, 16)
    backends: tuple[Any, ...] = ("gather", "reference")
    for backend in backends:
        query = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        output = attend(query, query, query, blocks, backend=backend)
        if backend == "reference":
            found, = torch.autograd.grad(output, query, gradients, is_grads_batched=True)
            assert found.shape == gradients.shape
        else:
            with pytest.raises(NotServed, match=r"no backward of several gradients at once.*take backend='reference'"):
                torch.autograd.grad(output, query, gradients, is_grads_batched=True)


def test_masks_of_bool_are_saved_without_a_copy() -> None:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    query = torch.randn(1, 2, LENGTH, 16, requires_grad=True)
    saved: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bool and tensor.numel() == mask.numel():
            saved.add(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        attend(query, query, query, Blocks.dense(LENGTH, LENGTH, 16), mask=mask)
    assert saved == {mask.data_ptr()}


def test_an_output_may_be_written_to_where_backward_does_not_need_it() -> None:
    query = torch.randn(1, 2, LENGTH, 16, requires_grad=True)
    output = attend(query, query, query, Blocks.dense(LENGTH, LENGTH, 16), backend="native")
    output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as of torch's own attention
        output.sum().backward()
