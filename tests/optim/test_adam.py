"""Adam without bias correction against its formula, alone and in an engine."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Adam, AdamW

import shoal
from shoal.errors import ConfigError
from shoal.native.step import available
from shoal.optim.adam import BiasedAdam
from shoal.testing import run_ranks

BETAS, EPS = (0.8, 0.95), 1e-6


def reference(weight: Tensor, gradients: list[Tensor], lr: float, decay: float, *, decoupled: bool) -> Tensor:
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for given_ in gradients:
        gradient = given_ if decoupled else given_ + decay * weight
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        shrunk = weight * (1 - lr * decay) if decoupled else weight
        weight = shrunk - lr * mean / (square.sqrt() + EPS)
    return weight


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-4, 0.1), st.sampled_from([0.0, 0.1]), st.booleans(), st.integers(0, 99))
def test_adam_without_correction_is_its_formula(lr: float, decay: float, decoupled: bool, seed: int) -> None:
    start, *gradients = torch.randn(6, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight = start.clone().requires_grad_()
    optimizer = BiasedAdam([weight], lr, BETAS, EPS, decay, bias_correction=False, decoupled_weight_decay=decoupled)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    expected = reference(start, list(gradients), lr, decay, decoupled=decoupled)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("plain", "decoupled"), [(Adam, False), (AdamW, True)])
def test_groups_with_correction_step_bitwise_as_torch(plain: Any, decoupled: bool) -> None:
    random = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 9, generator=random)
    one, two, other = (start.clone().requires_grad_() for _ in range(3))
    ours = BiasedAdam([{"params": [one]}, {"params": [other], "bias_correction": False}], weight_decay=0.1,
                      decoupled_weight_decay=decoupled)
    theirs = plain([two], weight_decay=0.1)
    hooked: list[Any] = []

    def record(optimizer: Any, args: Any, kwargs: Any) -> None:
        hooked.append(optimizer)

    ours.register_step_pre_hook(record)
    for gradient in gradients:
        one.grad, two.grad, other.grad = gradient.clone(), gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    assert torch.equal(one, two) and not torch.equal(one, other) and len(hooked) == len(gradients)
    assert ours.state_dict()["param_groups"][1]["params"] == [1]


def test_options_that_the_uncorrected_step_lacks_are_refused() -> None:
    for options in ({"amsgrad": True}, {"maximize": True}):
        with pytest.raises(ConfigError, match="bias_correction=False with amsgrad or maximize"):
            BiasedAdam([nn.Parameter(torch.ones(1))], bias_correction=False, **options)


OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": BETAS, "eps": EPS, "weight_decay": 0.1, "bias_correction": False}


def ignore(optimizer: Any, args: Any, kwargs: Any) -> None:
    """A step hook, which keeps native code from the step."""


def step_beside(engine: shoal.Engine, plain: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor,
                steps: int) -> None:
    """Take as many steps of the engine and of `plain`, which `optimizer` trains."""
    for _ in range(steps):
        engine.backward(engine(inputs).square().mean())
        engine.step()
        optimizer.zero_grad()
        plain(inputs).square().mean().backward()
        optimizer.step()


def train(stage: int, native: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    model, inputs = deepcopy(plain), torch.randn(2, 6)
    optimizer = BiasedAdam(plain.parameters(), **OPTIONS, decoupled_weight_decay=True)
    engine, *_ = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": OPTIONS}})
    if not native:
        assert engine.optimizer is not None
        engine.optimizer.optimizer.register_step_post_hook(ignore)
    step_beside(engine, plain, optimizer, inputs, 4)
    with shoal.gathered(model):
        for expected, trained in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(trained.detach(), expected.detach(), rtol=1e-5, atol=1e-6)


def both(native: bool) -> None:
    for stage in (0, 2, 3):
        train(stage, native)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.skipif(
    not available(), reason="native code does not build here"))])
def test_an_engine_steps_without_correction_by_the_formula(native: bool) -> None:
    run_ranks(2, both, native)


def train_with_default_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 1)
    model, inputs = deepcopy(plain), torch.randn(2, 4)
    torch.set_default_dtype(dtype)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    engine, *_ = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}})
    step_beside(engine, plain, optimizer, inputs, 300)  # bf16 counts to 256
    with shoal.gathered(model):
        for expected, trained in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(trained.detach(), expected.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_steps_are_counted_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    run_ranks(1, train_with_default_dtype, dtype)
