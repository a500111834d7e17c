"""OneCycle and LRRangeTest equal the published formulas and hand-computed values, and resume exactly."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adagrad, Adam, AdamW

import shoal
from shoal.errors import ConfigError
from shoal.schedule import LRRangeTest, OneCycle, Schedule, make_schedule
from shoal.testing import run_ranks

sizes = st.integers(1, 12)


def adam(*rates: float) -> Adam:
    return Adam([{"params": [torch.zeros(1)], "lr": rate} for rate in rates or (0.5,)], betas=(0.7, 0.95))


def momentum_of(group: dict[str, Any]) -> float:
    return group["betas"][0] if "betas" in group else group["momentum"]


def written(schedule: Schedule, steps: int) -> list[tuple[float, float]]:
    """Return the learning rate and momentum of the first group for optimizer steps 0, 1, 2, ..."""
    found: list[tuple[float, float]] = []
    for _ in range(steps):
        group = schedule.optimizer.param_groups[0]
        found.append((group["lr"], momentum_of(group)))
        schedule.step()
    return found


def near(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-12)


def test_a_cycle_equals_values_computed_by_hand() -> None:
    schedule = OneCycle(adam(), 1.0, 5.0, cycle_first_step_size=4, cycle_second_step_size=2, cycle_min_mom=0.8,
                        cycle_max_mom=0.9, decay_lr_rate=1.0, decay_mom_rate=0.05, decay_step_size=2)
    rates, momenta = zip(*written(schedule, 11), strict=True)
    assert list(rates) == near([1, 2, 3, 4, 5, 3, 1, 1 / 1.5, 1 / 2, 1 / 2.5, 1 / 3])
    assert list(momenta) == near([.9, .875, .85, .825, .8, .85, .9, .9225, .945, .9675, .99])


def test_stairs_are_constant_and_reach_both_limits() -> None:
    schedule = OneCycle(adam(), 0.0, 1.0, cycle_first_step_size=6, cycle_second_step_size=4, cycle_first_stair_count=3,
                        cycle_second_stair_count=2, cycle_min_mom=0.0, cycle_max_mom=0.5)
    rates, momenta = zip(*written(schedule, 12), strict=True)
    assert list(rates) == near([0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 1, 0.5, 0.5, 0, 0])
    assert list(momenta) == near([0.5 - rate / 2 for rate in rates])


def test_the_second_side_defaults_to_the_first() -> None:
    given_, alike = (OneCycle(adam(), 0.0, 1.0, cycle_first_step_size=6, cycle_first_stair_count=3, **second)
                     for second in ({"cycle_second_step_size": 6, "cycle_second_stair_count": 3}, {}))
    assert written(given_, 20) == written(alike, 20)


def test_without_a_second_side_the_decay_follows_the_maximum() -> None:
    schedule = OneCycle(adam(), 1.0, 3.0, decay_lr_rate=1.0, cycle_first_step_size=2, cycle_second_step_size=0,
                        decay_step_size=1)
    assert [rate for rate, _ in written(schedule, 5)] == near([1, 2, 3, 1 / 2, 1 / 3])


@given(sizes, st.integers(0, 12), st.integers(0, 3), st.floats(0, 2), st.floats(0, 1e-3), st.floats(1e-3, 1))
def test_a_cycle_equals_its_formula(first: int, second: int, size: int, rate: float, low: float, high: float) -> None:
    schedule = OneCycle(adam(), low, high, rate, first, second, decay_step_size=size, cycle_min_mom=0.6, cycle_max_mom=0.8)

    def expected(n: int) -> tuple[float, float]:
        if n <= first:
            height = n / first
        elif n <= first + second:
            height = 1 - (n - first) / second
        else:
            return low / (1 + rate * (n - first - second) / size) if size else low, 0.8
        return low + (high - low) * height, 0.8 - 0.2 * height

    for found, n in zip(written(schedule, 30), range(30), strict=True):
        assert found == pytest.approx(expected(n), rel=1e-12)


@given(sizes, sizes, st.integers(0, 4), st.integers(0, 4))
def test_the_momentum_mirrors_the_learning_rate(first: int, second: int, stairs: int, more: int) -> None:
    schedule = OneCycle(adam(), 0.1, 0.5, 0, first, second, stairs, more, cycle_min_mom=0.6, cycle_max_mom=0.8)
    found = written(schedule, first + second + 3)
    assert [(rate - 0.1) / 0.4 for rate, _ in found] == pytest.approx([(0.8 - mom) / 0.2 for _, mom in found], abs=1e-12)
    assert max(rate for rate, _ in found) == pytest.approx(0.5)
    rates = [rate for rate, _ in found]
    assert rates[:first + 1] == sorted(rates[:first + 1]) and rates[first:] == sorted(rates[first:], reverse=True)


@given(st.integers(0, 30))
def test_a_resumed_cycle_equals_an_uninterrupted_one(cut: int) -> None:
    options: dict[str, Any] = {"decay_lr_rate": 0.5, "decay_step_size": 3, "decay_mom_rate": 0.01,
                               "cycle_first_step_size": 7, "cycle_second_step_size": 9}
    whole = written(OneCycle(adam(), 0.1, 0.7, **options), 40)
    first, second = (OneCycle(adam(), 0.1, 0.7, **options) for _ in range(2))
    head = written(first, cut)
    second.load_state_dict(first.state_dict())
    assert (second.get_last_lr(), second.get_mom()) == (first.get_last_lr(), first.get_mom())
    assert head + written(second, 40 - cut) == whole


def test_each_group_has_its_own_cycle() -> None:
    schedule = OneCycle(adam(1, 1), [0.1, 0.2], [0.5, 0.6], cycle_first_step_size=2, cycle_min_mom=[0.5, 0.6],
                        cycle_max_mom=[0.7, 0.8])
    assert (schedule.get_lr(), schedule.get_mom()) == ([0.1, 0.2], [(0.7, 0.99), (0.8, 0.99)])
    schedule.step(1)
    assert schedule.get_lr() == near([0.5, 0.6]) and schedule.get_mom() == [(0.5, 0.99), pytest.approx((0.6, 0.99))]
    assert [group["betas"] for group in schedule.optimizer.param_groups] == schedule.get_mom()


def test_sgd_cycles_its_momentum() -> None:
    schedule = OneCycle(SGD([torch.zeros(1)], lr=1, momentum=0.3), 0.1, 0.5, cycle_first_step_size=2)
    assert written(schedule, 3) == [pytest.approx(pair) for pair in ((0.1, 0.9), (0.3, 0.85), (0.5, 0.8))]
    assert schedule.get_mom() == [pytest.approx(0.85)]


def test_without_cycle_momentum_the_momentum_is_unchanged() -> None:
    schedule = OneCycle(adam(), 0.1, 0.5, cycle_first_step_size=2, cycle_momentum=False)
    assert [momentum for _, momentum in written(schedule, 5)] == [0.7] * 5
    assert schedule.get_mom() == [(0.7, 0.95)]


@pytest.mark.parametrize("kind", [SGD, Adagrad])
def test_without_momentum_a_warning_is_given_and_only_the_rate_cycles(kind: Any,
                                                                        caplog: pytest.LogCaptureFixture) -> None:
    optimizer = kind([torch.zeros(1)])
    before = dict(optimizer.param_groups[0])
    with caplog.at_level(logging.WARNING, "shoal"):
        schedule = OneCycle(optimizer, 0.1, 0.5, cycle_first_step_size=2)
    assert f"cycle_momentum: {kind.__name__} has no betas and no momentum above 0" in caplog.text
    schedule.step(1)
    assert optimizer.param_groups[0] == {**before, "lr": pytest.approx(0.5)}
    assert schedule.get_mom() == [0]


def test_replacing_the_second_beta_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal"):
        OneCycle(Adam([torch.zeros(1)], betas=(0.9, 0.97)), 0.1, 0.5)
    assert "OneCycle sets the second beta to 0.99, as published; the optimizer was given 0.97" in caplog.text


def test_a_growing_momentum_stays_below_1() -> None:
    schedule = OneCycle(adam(), 0.1, 0.5, 0, 1, 0, decay_step_size=1, decay_mom_rate=0.5)
    assert [mom for _, mom in written(schedule, 5)][2:] == [0.999] * 3


def test_a_torch_optimizer_uses_the_cycled_values() -> None:
    """AdamW under OneCycle equals AdamW under torch's OneCycleLR, bias correction by the current beta included."""
    ours, theirs = (AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.04, betas=(0.9, 0.99)) for _ in range(2))
    mine = OneCycle(ours, 0.04, 0.4, cycle_first_step_size=3, cycle_second_step_size=3, cycle_min_mom=0.8, cycle_max_mom=0.9)
    other = torch.optim.lr_scheduler.OneCycleLR(theirs, 0.4, total_steps=7, pct_start=4 / 7, anneal_strategy="linear",
                                                base_momentum=0.8, max_momentum=0.9, div_factor=10, final_div_factor=1)
    for _ in range(6):
        for optimizer, schedule in ((ours, mine), (theirs, other)):
            weight = optimizer.param_groups[0]["params"][0]
            weight.grad = weight.detach() ** 2
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(ours.param_groups[0]["params"][0], theirs.param_groups[0]["params"][0])


CYCLE: dict[str, Any] = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "cycle_second_step_size": 2,
                         "decay_lr_rate": 1.0, "decay_step_size": 1}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def trained(steps: int, folder: str, native: bool) -> tuple[dict[str, torch.Tensor], Any]:
    """Resume from the last checkpoint in `folder`, train to step `steps`, and save a checkpoint."""
    engine, *_ = shoal.initialize(model=net(), config={
        "train_batch_size": 2, "gradient_clipping": 0, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1, "weight_decay": 0.1, "torch_adam": not native}},
        "scheduler": {"type": "onecycle", "params": CYCLE}})
    engine.load_checkpoint(folder)
    while engine.global_steps < steps:
        torch.manual_seed(engine.global_steps)
        engine.backward(engine(torch.randn(2, 8)[engine.global_rank][None]).pow(2).mean())
        engine.step()
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}, engine.get_mom()


@pytest.mark.parametrize("native", [True, False])
def test_an_engine_equals_torch_across_a_resume_in_the_cycle(native: bool, tmp_path: Path) -> None:
    run_ranks(2, trained, 4, str(tmp_path), native)
    found = run_ranks(2, trained, 8, str(tmp_path), native)
    model = net()
    optimizer = AdamW(model.parameters(), lr=1, weight_decay=0.1)
    schedule = OneCycle(optimizer, **CYCLE)
    for step in range(8):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(2, 8)).pow(2).mean().backward()
        optimizer.step()
        schedule.step()
    for weights, momentum in found:
        torch.testing.assert_close(weights, dict(model.state_dict()))
        assert momentum == schedule.get_mom()


@pytest.mark.parametrize(("params", "message"), [
    ({"cycle_first_step_size": 0}, r"cycle_first_step_size: got 0; give a whole number of steps, 1 or more"),
    ({"cycle_second_step_size": -1}, r"cycle_second_step_size: got -1; give a whole number of steps, 0 or more"),
    ({"cycle_first_stair_count": 1.5}, r"cycle_first_stair_count: got 1\.5"),
    ({"cycle_second_stair_count": True}, r"cycle_second_stair_count: got True"),
    ({"decay_step_size": "9"}, r"decay_step_size: got '9'"),
    ({"decay_lr_rate": -0.5}, r"decay_lr_rate: got -0\.5; give one finite number, 0 or more"),
    ({"decay_mom_rate": float("nan")}, r"decay_mom_rate: got nan"),
    ({"cycle_min_lr": "low"}, r"cycle_min_lr: got 'low'"),
    ({"cycle_min_lr": [0.1, 0.2]}, r"cycle_min_lr: got \[0\.1, 0\.2\], 2 numbers for 1 parameter groups"),
    ({"cycle_max_lr": 0.01}, r"cycle_max_lr: got 0\.01, below cycle_min_lr of 0\.1"),
    ({"cycle_min_mom": 0.95}, r"cycle_max_mom: got 0\.9, below cycle_min_mom of 0\.95"),
    ({"cycle_max_mom": 1}, r"cycle_max_mom: got 1; a momentum is below 1"),
])
def test_an_error_names_the_key(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"scheduler\.params\.{message}"):
        make_schedule("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, **params}, adam())


def test_a_missing_limit_is_named() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.params\.cycle_max_lr: missing; OneCycle needs it"):
        make_schedule("OneCycle", {"cycle_min_lr": 0.1}, adam())


def sgd(*rates: float) -> SGD:
    return SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in rates or (0.5,)])


def written_rates(schedule: Schedule, steps: int) -> list[float]:
    """Return the learning rates of the first group for optimizer steps 0, 1, 2, ..."""
    rates: list[float] = []
    for _ in range(steps):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return rates


def test_the_range_test_equals_values_computed_by_hand() -> None:
    assert written_rates(LRRangeTest(sgd(), 0.5, 2, 3.0), 6) == [0.5, 1.25, 2.0, 2.75, 3.5, 4.25]
    assert written_rates(LRRangeTest(sgd(), 0.5, 2, 3.0, lr_range_test_staircase=True), 6) == [0.5, 0.5, 2.0, 2.0, 3.5, 3.5]


@given(st.floats(1e-6, 1), st.integers(1, 50), st.floats(0, 10), st.booleans())
def test_the_range_test_equals_its_formula(low: float, size: int, rate: float, stairs: bool) -> None:
    found = written_rates(LRRangeTest(sgd(), low, size, rate, stairs), 60)
    assert found == pytest.approx([low * (1 + rate * (n // size if stairs else n / size)) for n in range(60)], rel=1e-12)


def test_the_range_test_defaults_are_the_published_ones() -> None:
    assert written_rates(LRRangeTest(sgd()), 2001)[::2000] == pytest.approx([1e-3, 2e-3])


def test_each_group_of_a_range_test_rises_from_its_own_minimum() -> None:
    schedule = LRRangeTest(sgd(1, 1), [0.1, 0.2], 1)
    schedule.step()
    assert [group["lr"] for group in schedule.optimizer.param_groups] == pytest.approx([0.2, 0.4])


@given(st.integers(0, 20))
def test_a_resumed_range_test_equals_an_uninterrupted_one(cut: int) -> None:
    first, second = (LRRangeTest(sgd(), 0.1, 3, 0.7) for _ in range(2))
    head = written_rates(first, cut)
    second.load_state_dict(first.state_dict())
    assert head + written_rates(second, 30 - cut) == written_rates(LRRangeTest(sgd(), 0.1, 3, 0.7), 30)


@pytest.mark.parametrize(("params", "message"), [
    ({"lr_range_test_step_size": 0}, r"lr_range_test_step_size: got 0; give a whole number of steps, 1 or more"),
    ({"lr_range_test_step_size": 2.5}, r"lr_range_test_step_size: got 2\.5"),
    ({"lr_range_test_step_rate": -1}, r"lr_range_test_step_rate: got -1; give one finite number, 0 or more"),
    ({"lr_range_test_min_lr": [1, 2]}, r"lr_range_test_min_lr: got \[1, 2\], 2 numbers for 1 parameter groups"),
    ({"lr_range_test_min_lr": None}, r"lr_range_test_min_lr: got None"),
    ({"lr_range_test_size": 2}, r"lr_range_test_size: \w+ has no such keyword; did you mean 'lr_range_test_ste"),
])
def test_a_range_test_error_names_the_key(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"scheduler\.params\.{message}"):
        make_schedule("lrrangetest", params, sgd())
