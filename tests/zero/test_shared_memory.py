"""Parameters that share memory are tied as one object, or refused; views of disjoint parts of one memory train."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.testing import run_ranks

CONFIG = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error"}


class Two(nn.Module):
    """Two parameters over one memory of 4 x 4."""

    def __init__(self, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], *,
                 trained: bool = True) -> None:
        super().__init__()
        memory = torch.arange(16.0).view(4, 4)
        self.first = nn.Parameter(first(memory), requires_grad=trained)
        self.second = nn.Parameter(second(memory), requires_grad=trained)
        self.own = nn.Parameter(torch.ones(1))

    def forward(self) -> Tensor:
        return (self.first.sum() + self.second.sum()) * self.own


def whole(memory: Tensor) -> Tensor:
    return memory


@pytest.mark.parametrize("second", [whole, Tensor.t, lambda m: m[:1], lambda m: m[:, 2:3], lambda m: m[:1].expand(3, 4)],
                         ids=["same", "transposed", "rows", "column", "expanded"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_shares_memory_is_refused_by_both_names(second: Callable[[Tensor], Tensor],
                                                                 stage: int) -> None:
    with pytest.raises(UsageError, match=r"'first' \(4, 4\) and 'second' .* share memory .* Tie them as one object"):
        shoal.initialize(model=Two(whole, second), config={**CONFIG, "zero_optimization": {"stage": stage}})


def test_a_buffer_that_shares_a_parameters_memory_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", model.weight.detach())
    with pytest.raises(UsageError, match=r"'weight' .* and 'seen' .* share memory"):
        shoal.initialize(model=model, config=CONFIG)


def disjoint(first: str, trained: bool) -> float:
    parts = {"rows": (lambda m: m[:2], lambda m: m[2:]), "columns": (lambda m: m[:, :2], lambda m: m[:, 2:]),
             "shared": (whole, whole)}[first]
    engine = shoal.initialize(model=Two(*parts, trained=trained), config=CONFIG)[0]
    loss = engine()
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return loss.item()


@pytest.mark.parametrize(("first", "trained"), [("rows", True), ("columns", True), ("shared", False)])
def test_disjoint_parts_and_frozen_parameters_of_one_memory_are_accepted(first: str, trained: bool) -> None:
    assert run_ranks(1, disjoint, first, trained) == [240.0 if first == "shared" else 120.0]
