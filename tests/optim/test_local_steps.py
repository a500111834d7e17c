"""Local steps of 0/1 Adam send nothing and leave weights alone; the next synchronisation applies their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.optim.onebit import ZeroOneAdam
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

from .compressed_runs import LOCAL_STEPS, Whole, batch, engine_of, lower_rate, train, weights

EACH, TWO, THREE = [1], [0, 2], [0, 0, 3]


@pytest.mark.parametrize(("rate", "due"), [
    (0.1, EACH * 8 + TWO * 2 + THREE * 2), (0.4, EACH * 8 + TWO * 5), (0.6, EACH * 18), (1.0, EACH * 18),
])  # fmt: skip
def test_local_steps_double_up_to_the_clipper_as_the_learning_rate_falls(rate: float, due: list[int]) -> None:
    optimizer = ZeroOneAdam([nn.Parameter(torch.ones(1))], lr=1.0, **LOCAL_STEPS)
    (group,), found = optimizer.param_groups, list[int]()
    optimizer.communicates = True
    for _ in range(18):
        found.append(optimizer.steps_in_gradient(group))
        optimizer.count_step()
        group["lr"] = rate
    assert found == due
    optimizer.communicates = False
    assert optimizer.steps_in_gradient(group) == 1, "one rank alone synchronises in every step"
    group["waiting_steps"] = 2
    assert optimizer.steps_in_gradient(group) == 3, "but applies local steps of a former run"


def schedule(rates: list[tuple[float, float]]) -> list[tuple[int, int]]:
    """Return the steps due and the limit of joint steps, by step, for two groups whose rates are multiples of the first."""
    optimizer = ZeroOneAdam([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=1.0, **LOCAL_STEPS)
    optimizer.communicates = True
    found: list[tuple[int, int]] = []
    for rate in rates:
        for group, factor in zip(optimizer.param_groups, rate, strict=True):
            group["lr"] = factor
        found.append((optimizer.steps_in_gradient(optimizer.param_groups[1]),
                      min(map(optimizer.max_joint_steps, optimizer.param_groups))))
        optimizer.count_step()
    return found


def test_joint_steps_move_no_group_farther_than_its_largest_step() -> None:
    assert [due for due, _ in schedule([(0.0, 1.0)] + [(0.0, 1.0)] * 17)] == EACH * 18, "one rate is not lowered"
    assert [due for due, _ in schedule([(1.0, 1.0)] * 8 + [(0.0, 0.1)] * 10)] == EACH * 9 + [0, 2] * 2 + [0, 0, 3] + [0, 0]
    risen = schedule([(1.0, 1.0)] * 8 + [(0.1, 0.1)] * 5 + [(1.0, 0.1)] * 4)
    assert risen[12:] == [(2, 10), (0, 1), (2, 1), (1, 1), (1, 1)], "a raised rate synchronises early"


def local_steps(config: dict[str, Any]) -> tuple[list[int], list[bool], list[float]]:
    params = {"var_update_scaler": 2, **LOCAL_STEPS}
    engine = engine_of(kind="ZeroOneAdam", params=params, **config)
    sent, moved, losses = [], [], []
    for step in range(20):
        before, was = traffic.bytes["reduce"] + traffic.bytes["publish"], weights(engine)
        losses += train(engine, range(step, step + 1))
        sent.append(traffic.bytes["reduce"] + traffic.bytes["publish"] - before)
        moved.append(not torch.equal(weights(engine), was))
        lower_rate(engine)
    assert engine.skipped_steps == 0 and engine.global_steps == 20
    return sent, moved, losses


@pytest.mark.parametrize("config", [
    {}, {"gradient_accumulation_steps": 1, "gradient_clipping": 0.1}, {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True, "initial_scale_power": 4}}], ids=str)
def test_local_steps_send_nothing_and_leave_the_weights_alone(config: dict[str, Any]) -> None:
    for sent, moved, losses in run_ranks(2, local_steps, config):
        busy = [True] * 8 + [False, True] * 2 + [False, False, True] * 2 + [False] * 2
        assert moved == busy and [size > 0 for size in sent] == busy
        assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def jointly_stepped() -> tuple[Tensor, Tensor]:
    """Take two joint steps; return the weights, and those of two steps of Adam with the mean gradient, computed by hand."""
    params = {"var_freeze_step": 1, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 2,
              "look_ahead": 0.0, "variance_floor": 0.0, "weight_decay": 0.0}
    engine = engine_of(kind="ZeroOneAdam", params=params, build=Whole)
    train(engine, range(3))  # one updates the variance, two synchronise each
    lr = 5e-3
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    train(engine, range(3, 4))  # the last that synchronises alone, at the lowered rate
    assert engine.sharded is not None and engine.optimizer is not None
    (unit,) = engine.sharded.units
    assert unit.state is not None and unit.gradient is not None
    (view, *_) = engine.optimizer.views.views
    state = engine.optimizer.optimizer.state[view.parameter]
    master, momentum = view.parameter.detach().clone(), state["exp_avg"].clone()
    train(engine, range(4, 5))  # a local step
    kept = unit.gradient.accumulator.residual
    assert kept is not None and torch.equal(view.parameter, master), "a local step leaves the master alone"
    train(engine, range(5, 6))
    beta1 = 0.9
    after = state["exp_avg"]
    mean = (after - beta1**2 * momentum) / (1 - beta1**2)
    twice = [beta1 * momentum + (1 - beta1) * mean]
    twice.append(beta1 * twice[0] + (1 - beta1) * mean)
    torch.testing.assert_close(after, twice[1])
    variance = state["exp_avg_sq"] / (1 - 0.999 ** int(state["taken"].item()))
    steps = [moment / (1 - beta1 ** int(state["step"].item())) for moment in twice]
    return view.parameter.detach(), master - lr * sum(steps, torch.zeros_like(master)) / (variance.sqrt() + 1e-8)


def test_joint_steps_equal_as_many_of_adam_with_the_mean_gradient() -> None:
    for found, expected in run_ranks(2, jointly_stepped):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def poisoned(at: int) -> tuple[list[bool], list[bool]]:
    """Train with a NaN gradient at step `at`; return which steps were applied, and which moved weights."""
    engine = engine_of(kind="ZeroOneAdam", params={"var_update_scaler": 2, **LOCAL_STEPS})
    applied, moved = [], []
    for step in range(20):
        was = weights(engine)
        x, y = batch(step, engine.global_rank)
        engine.backward(nn.functional.mse_loss(engine(x), y) * (float("nan") if step + 1 == at else 1.0))
        engine.step()
        applied.append(engine.was_step_applied())
        moved.append(not torch.equal(weights(engine), was))
        lower_rate(engine)
    assert weights(engine).isfinite().all()
    return applied, moved


@pytest.mark.parametrize("at", [14, 15])
def test_nan_drops_the_local_steps_since_the_last_synchronisation(at: int) -> None:
    for applied, moved in run_ranks(2, poisoned, at):
        assert [step for step, done in enumerate(applied, 1) if not done] == [15], "13 to 15 would be one joint step"
        assert [step for step, done in enumerate(moved, 1) if done] == [*range(1, 9), 10, 12, 18]
