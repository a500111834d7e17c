"""LRRangeTest equals the published formula, with stairs and groups, and resumes exactly."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD

from shoal.errors import ConfigError
from shoal.schedule import LRRangeTest, Schedule, make_schedule


def sgd(*rates: float) -> SGD:
    return SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in rates or (0.5,)])


def written(schedule: Schedule, steps: int) -> list[float]:
    """Return the learning rates of the first group for optimizer steps 0, 1, 2, ..."""
    rates: list[float] = []
    for _ in range(steps):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return rates


def test_the_rates_equal_values_computed_by_hand() -> None:
    assert written(LRRangeTest(sgd(), 0.5, 2, 3.0), 6) == [0.5, 1.25, 2.0, 2.75, 3.5, 4.25]
    assert written(LRRangeTest(sgd(), 0.5, 2, 3.0, lr_range_test_staircase=True), 6) == [0.5, 0.5, 2.0, 2.0, 3.5, 3.5]


@given(st.floats(1e-6, 1), st.integers(1, 50), st.floats(0, 10), st.booleans())
def test_the_range_test_equals_its_formula(low: float, size: int, rate: float, stairs: bool) -> None:
    found = written(LRRangeTest(sgd(), low, size, rate, stairs), 60)
    assert found == pytest.approx([low * (1 + rate * (n // size if stairs else n / size)) for n in range(60)], rel=1e-12)


def test_the_defaults_are_the_published_ones() -> None:
    assert written(LRRangeTest(sgd()), 2001)[::2000] == pytest.approx([1e-3, 2e-3])


def test_each_group_rises_from_its_own_minimum() -> None:
    schedule = LRRangeTest(sgd(1, 1), [0.1, 0.2], 1)
    schedule.step()
    assert [group["lr"] for group in schedule.optimizer.param_groups] == pytest.approx([0.2, 0.4])


@given(st.integers(0, 20))
def test_a_resumed_range_test_equals_an_uninterrupted_one(cut: int) -> None:
    first, second = (LRRangeTest(sgd(), 0.1, 3, 0.7) for _ in range(2))
    head = written(first, cut)
    second.load_state_dict(first.state_dict())
    assert head + written(second, 30 - cut) == written(LRRangeTest(sgd(), 0.1, 3, 0.7), 30)


@pytest.mark.parametrize(("params", "message"), [
    ({"lr_range_test_step_size": 0}, r"lr_range_test_step_size: got 0; give a whole number of steps, 1 or more"),
    ({"lr_range_test_step_size": 2.5}, r"lr_range_test_step_size: got 2\.5"),
    ({"lr_range_test_step_rate": -1}, r"lr_range_test_step_rate: got -1; give one finite number, 0 or more"),
    ({"lr_range_test_min_lr": [1, 2]}, r"lr_range_test_min_lr: got \[1, 2\], 2 numbers for 1 parameter groups"),
    ({"lr_range_test_min_lr": None}, r"lr_range_test_min_lr: got None"),
    ({"lr_range_test_size": 2}, r"lr_range_test_size: \w+ has no such keyword; did you mean 'lr_range_test_ste"),
])
def test_an_error_names_the_key(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"scheduler\.params\.{message}"):
        make_schedule("lrrangetest", params, sgd())
