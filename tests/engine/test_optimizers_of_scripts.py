"""Optimizers that scripts write themselves: what they keep on themselves, and in their groups, decides how they step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import shoal
from shoal.errors import OptimizerError, UsageError
from shoal.testing import run_ranks


class Scaled(Optimizer):
    """Steps by the gradient or by its sign, times a scale and a warm-up that it counts itself."""

    scale = 1.0

    def __init__(self, params: Any, lr: float = 0.05, *, sign: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.sign = sign
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        warm = min(1.0, self.steps / 4)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign() if self.sign else p.grad, alpha=-group["lr"] * self.scale * warm)


class Normed(Optimizer):
    """Divides by the norm of a whole gradient where its group says so."""

    def __init__(self, params: Any, lr: float = 0.05, normed: bool = False) -> None:
        super().__init__(params, {"lr": lr, "normed": normed})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / p.grad.norm() if group["normed"] else p.grad, alpha=-group["lr"])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "zero_optimization": {"stage": stage, **more}}


def scaled(stage: int | None, **more: Any) -> tuple[list[Tensor], int]:
    """Step six times, with other options from the fourth on; return the weights, and the steps that were counted."""
    whole = model()
    optimizer = Scaled(whole.parameters(), sign=True)
    if stage is not None:
        shoal.initialize(model=whole, optimizer=optimizer, config=config(stage, **more))
    for step in range(6):
        if step == 3:
            optimizer.sign, optimizer.scale = False, 0.5
        whole(torch.ones(2, 4) * step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with shoal.gathered(whole):
        return [p.detach().clone() for p in whole.parameters()], optimizer.steps


@pytest.mark.parametrize(("stage", "more"), [(0, {}), (2, {}), (3, {}), (2, {"sub_group_size": 8})])
def test_what_an_optimizer_keeps_on_itself_decides_its_steps(stage: int, more: dict[str, Any]) -> None:
    expected, steps = scaled(None)
    for found, counted in run_ranks(2, scaled, stage, **more):
        assert counted == steps == 6
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted)


def test_the_options_of_each_group_are_probed() -> None:
    whole = model()
    groups = [{"params": whole[0].parameters()}, {"params": whole[2].parameters(), "normed": True}]
    with pytest.raises(OptimizerError, match="Normed is not elementwise"):
        shoal.initialize(model=whole, optimizer=Normed(groups), config=config(0))
    shoal.initialize(model=whole, optimizer=Normed(whole.parameters()), config=config(0))[0].destroy()


def test_a_replaced_step_is_refused_and_may_be_replaced_afterwards() -> None:
    whole = model()
    optimizer = SGD(whole.parameters(), lr=0.1)
    plain, calls = optimizer.step, []

    def step(closure: Any = None) -> Any:
        calls.append(1)
        return plain(closure)

    optimizer.step = step  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"optimizer.step of the SGD was replaced .*replace it after initialize"):
        shoal.initialize(model=whole, optimizer=optimizer, config=config(0))
    del optimizer.step
    engine = shoal.initialize(model=whole, optimizer=optimizer, config=config(0))[0]
    plain = optimizer.step
    optimizer.step = step  # type: ignore[method-assign]
    whole(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    assert (calls, engine.global_steps) == ([1], 1)


def norm_sgd(whole: nn.Module, **options: Any) -> Optimizer:
    return Normed(whole.parameters(), normed=True, **options)


def test_a_warm_up_that_begins_at_zero_hides_nothing_from_the_probe() -> None:
    whole = model()
    optimizer = norm_sgd(whole)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert optimizer.param_groups[0]["lr"] == 0
    with pytest.raises(OptimizerError, match="Normed is not elementwise"):
        shoal.initialize(model=whole, optimizer=optimizer, config=config(0))


class Lookahead(Optimizer):
    """Steps by another optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner = optimizer

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class OfOwnList(Optimizer):
    """Steps the parameters of a list of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.listed = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.listed:
            if p.grad is not None:
                p.sub_(p.grad)


@pytest.mark.parametrize(("make", "text"), [
    (lambda whole: Lookahead(norm_sgd(whole)), "Lookahead steps by another optimizer, which it keeps as 'inner'"),
    (lambda whole: OfOwnList(whole.parameters()), "its steps leave the weights of a probe as they are")])
def test_an_optimizer_that_steps_elsewhere_is_refused(make: Any, text: str) -> None:
    whole = model()
    whole(torch.ones(2, 4)).mean().backward()
    before = [p.detach().clone() for p in whole.parameters()]
    with pytest.raises(OptimizerError, match=text):
        shoal.initialize(model=whole, optimizer=make(whole), config=config(0))
    assert all(torch.equal(p, was) and p.grad is not None for p, was in zip(whole.parameters(), before, strict=True))


def count_without_slices() -> int:
    """Step a model of which rank 1 has no slice; return the steps that the optimizer has counted."""
    whole = nn.Linear(2, 1, bias=False)
    optimizer = Scaled(whole.parameters())
    shoal.initialize(model=whole, optimizer=optimizer, config=config(2))
    for _ in range(3):
        whole(torch.ones(2, 2)).mean().backward()
        optimizer.step()
    return optimizer.steps


def test_a_rank_without_a_slice_counts_the_steps_too() -> None:
    assert run_ranks(2, count_without_slices) == [3, 3]


def uneven(stage: int) -> tuple[list[Tensor], bool]:
    """Train a shared layer and branches that other ranks may not take, with gradients set to zero."""
    torch.manual_seed(0)
    whole = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = AdamW(whole.parameters(), lr=0.1)
    engine = shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))[0]
    for step in range(5):
        x = whole[0](torch.ones(2, 4))
        branch = 1 if step == 0 or (step + engine.global_rank) % 2 else 2  # each rank leaves out another one
        x = x + whole[branch](x)
        (x + (whole[2](x) if step == 0 else 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [p.detach().clone() for p in whole.parameters()], True


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_may_leave_out_other_parts_with_gradients_of_zeros(stage: int) -> None:
    (first, _), (second, _) = run_ranks(2, uneven, stage)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def heads(stage: int | None, set_to_none: bool) -> tuple[list[Tensor], list[float]]:
    """Train two heads in turn; return the weights, and the losses."""
    torch.manual_seed(0)
    whole = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    optimizer = AdamW(whole.parameters(), lr=0.1)
    if stage is not None:
        shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))
    losses: list[float] = []
    for step in range(6):
        loss = whole[step % 2](torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none and step > 2)
        losses.append(float(loss.detach()))
    with shoal.gathered(whole):
        return [p.detach().clone() for p in whole.parameters()], losses


def one_taken_away(stage: int | None) -> list[Tensor]:
    """Set one gradient to None before each step but the first, among gradients that are otherwise set to zero."""
    whole = model()
    optimizer = AdamW(whole.parameters(), lr=0.1)
    if stage is not None:
        shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))
    for step in range(4):
        whole(torch.ones(2, 4) * step).square().mean().backward()
        if step:
            whole[2].bias.grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [p.detach().clone() for p in whole.parameters()]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_that_is_set_to_none_is_not_stepped_with_zeros(stage: int) -> None:
    for found in run_ranks(2, one_taken_away, stage):
        for got, wanted in zip(found, one_taken_away(None), strict=True):
            torch.testing.assert_close(got, wanted)


def one_frozen(stage: int | None) -> list[Tensor]:
    """Freeze a layer whose gradients were set to zero: its momentum goes on."""
    whole = model()
    optimizer = AdamW(whole.parameters(), lr=0.1)
    if stage is not None:
        shoal.initialize(model=whole, optimizer=optimizer, config=config(stage))
    for step in range(5):
        whole(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        whole[0].requires_grad_(step < 1)
    with shoal.gathered(whole):
        return [p.detach().clone() for p in whole.parameters()]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_frozen_parameter_whose_gradient_is_zero_is_stepped(stage: int) -> None:
    for found in run_ranks(2, one_frozen, stage):
        for got, wanted in zip(found, one_frozen(None), strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_that_are_set_to_zero_are_stepped(stage: int, set_to_none: bool) -> None:
    expected, expected_losses = heads(None, set_to_none)
    for found, losses in run_ranks(2, heads, stage, set_to_none):
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted)
