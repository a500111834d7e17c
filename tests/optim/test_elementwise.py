"""Optimizers that may step slices of parameters: known classes, probed classes, and the errors for the rest."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import Optimizer

import shoal.optim.elementwise as elementwise
from shoal.errors import OptimizerError
from shoal.optim import check_elementwise, make_optimizer


class SignSGD(Optimizer):
    """An elementwise class that is not in the table."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "internal": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight -= group["lr"] * torch.sign(weight.grad)


class NormSGD(SignSGD):
    """Divides by the norm of the whole gradient, as LAMB and LARS do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight -= group["lr"] * weight.grad / weight.grad.norm()


class RowSGD(SignSGD):
    """Elementwise on flat tensors, row by row on matrices: only a probe that starts from a matrix sees it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight -= group["lr"] * (weight.grad - weight.grad.mean(0) if weight.dim() > 1 else weight.grad)


class NeedsClosure(SignSGD):
    def step(self, closure: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("known", sorted(elementwise.ELEMENTWISE, key=lambda c: c.__name__))
def test_the_probe_agrees_with_the_table_of_elementwise_classes(known: type[Optimizer]) -> None:
    check_elementwise(known, {})
    assert elementwise._same_on_slices(known)


@pytest.mark.parametrize("known", sorted(elementwise.WHOLE_TENSOR, key=lambda c: c.__name__))
def test_a_known_whole_tensor_class_is_refused_with_the_reason(known: type[Optimizer]) -> None:
    with pytest.raises(OptimizerError, match=f"optimizer: {known.__name__} .*flat.*use an elementwise one instead: AdamW"):
        check_elementwise(known, {}, trusted=True)


def test_an_unknown_elementwise_class_passes_the_probe() -> None:
    check_elementwise(SignSGD, SignSGD([torch.zeros(1)]).defaults)


@pytest.mark.parametrize("mixing", [NormSGD, RowSGD])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_class_that_mixes_elements_is_refused_even_when_trusted(mixing: type[Optimizer], trusted: bool) -> None:
    with pytest.raises(OptimizerError, match=r"is not elementwise: 3 steps on a matrix of 16 x 12 .* use an elementwise"):
        check_elementwise(mixing, {}, trusted=trusted)


def test_a_class_that_cannot_be_probed_needs_trust(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OptimizerError, match=r"could not be probed .*\(TypeError: .*zero_allow_untested_optimizer to true"):
        check_elementwise(NeedsClosure, {})
    with caplog.at_level(logging.WARNING, "shoal"):
        check_elementwise(NeedsClosure, {}, trusted=True)
    assert "could not be probed" in caplog.text


def test_the_probe_does_not_change_the_random_state() -> None:
    before = torch.get_rng_state()
    check_elementwise(SignSGD, {})
    assert torch.equal(torch.get_rng_state(), before)


def stepped(name: str, params: dict[str, Any], values: list[torch.Tensor], cuts: list[int]) -> torch.Tensor:
    start, *gradients = values
    pieces = [piece.clone().requires_grad_() for piece in start.tensor_split(cuts)]
    optimizer = make_optimizer(name, params, pieces)
    for gradient in gradients:
        for piece, part in zip(pieces, gradient.tensor_split(cuts), strict=True):
            piece.grad = part.clone()
        optimizer.step()
    return torch.cat([piece.detach() for piece in pieces])


def cut_and_whole(name: str, params: dict[str, Any], size: int, cut: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = list(torch.randn(4, size, generator=torch.Generator().manual_seed(seed)))
    return stepped(name, params, values, [min(cut, size)]), stepped(name, params, values, [])


@pytest.mark.parametrize(("name", "params"), [
    ("adam", {"foreach": True}), ("sgd", {"lr": 0.1, "momentum": 0.9}), ("adagrad", {}), ("lion", {"weight_decay": 0.1}),
])  # fmt: skip
@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 3000), cut=st.integers(0, 3000), seed=st.integers(0, 9))
def test_any_slice_steps_bitwise_as_the_whole(name: str, params: dict[str, Any], size: int, cut: int, seed: int) -> None:
    pieces, whole = cut_and_whole(name, params, size, cut, seed)
    assert torch.equal(pieces, whole)


@pytest.mark.parametrize("params", [{}, {"adam_w_mode": False, "weight_decay": 0.1}, {"amsgrad": True}])
@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 200), cut=st.integers(0, 200), seed=st.integers(0, 9))
def test_fused_adam_is_bitwise_at_whole_vectors_and_within_rounding_else(
        params: dict[str, Any], size: int, cut: int, seed: int) -> None:
    pieces, whole = cut_and_whole("adam", params, 16 * size, 16 * cut, seed)
    assert torch.equal(pieces, whole)
    pieces, whole = cut_and_whole("adam", params, 16 * size + 5, 16 * cut + 3, seed)
    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-7)
