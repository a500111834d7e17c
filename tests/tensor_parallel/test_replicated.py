"""Modules with whole parameters on parts of the data: names and modes stay, gradients are summed, children are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.tensor_parallel import Axis, Shared
from shoal.testing import run_ranks

from .test_layers import world


def norm_parity() -> None:
    torch.manual_seed(1)
    plain, axis = nn.LayerNorm(6), Axis(world())
    nn.init.normal_(plain.weight)
    mine = Shared(copy.deepcopy(plain), world())
    assert [name for name, _ in mine.named_parameters()] == ["weight", "bias"]
    x, weight = torch.randn(8, 6), torch.randn(8, 6)
    (plain(x) * weight).sum().backward()
    (mine(x.chunk(axis.ranks)[axis.rank]) * weight.chunk(axis.ranks)[axis.rank]).sum().backward()
    for (name, one), other in zip(mine.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_are_those_of_the_whole_data(ranks: int) -> None:
    run_ranks(ranks, norm_parity)


def states() -> list[bool]:
    norm = Shared(nn.BatchNorm1d(3, affine=True), world())
    norm.bias.requires_grad_(False)
    norm(torch.randn(4, 3)).sum().backward()
    seen = [bool(norm.get_buffer("num_batches_tracked") == 1), norm.bias.grad is None, norm.weight.grad is not None]
    norm.eval()
    norm(torch.randn(4, 3))
    norm.to(torch.float64)
    wide = norm(torch.randn(4, 3).double())
    return [*seen, bool(norm.get_buffer("num_batches_tracked") == 1), wide.dtype == torch.float64]


def test_buffers_frozen_parameters_and_modes_are_those_of_the_module() -> None:
    assert run_ranks(2, states) == [[True] * 5] * 2


def nested() -> str:
    with pytest.raises(UsageError) as caught:
        Shared(nn.Sequential(nn.LayerNorm(3)), world())
    return str(caught.value)


def test_a_module_with_children_is_refused() -> None:
    assert run_ranks(1, nested) == ["Shared: Sequential has modules within it; wrap those that have parameters, one by one"]
