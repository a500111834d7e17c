"""The warm-up schedules equal the published formulas, end at their limits, and resume exactly."""

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD

from shoal.errors import CheckpointError, ConfigError, UsageError
from shoal.schedule import Schedule, WarmupCosineLR, WarmupDecayLR, WarmupLR

kinds = st.sampled_from(["log", "linear"])
lengths = st.integers(1, 40)


def sgd(*rates: float) -> SGD:
    return SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in rates or (0.5,)])


def written(schedule: Schedule, steps: int) -> list[float]:
    """Return the learning rates of the first group for optimizer steps 0, 1, 2, ..."""
    rates: list[float] = []
    for _ in range(steps):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return rates


def warmup_fraction(kind: str, steps: int, t: int) -> float:
    return math.log(t + 1) / math.log(steps) if kind == "log" else t / steps


@given(kinds, lengths, st.floats(0, 1e-3), st.floats(1e-3, 1))
def test_warmup_equals_its_formula(kind: str, length: int, low: float, high: float) -> None:
    n = max(2, length)
    schedule = WarmupLR(sgd(), low, high, length, kind)
    expected = [low, *(low + (high - low) * (warmup_fraction(kind, n, t) if t < n else 1) for t in range(60))]
    assert written(schedule, 61) == pytest.approx(expected, rel=1e-12)


@given(kinds, lengths, st.integers(1, 80), st.floats(0, 1e-3), st.floats(1e-3, 1))
def test_decay_equals_its_formula(kind: str, length: int, total: int, low: float, high: float) -> None:
    n = max(2, length)
    schedule = WarmupDecayLR(sgd(), total, low, high, length, kind)

    def factor(t: int) -> float:
        return warmup_fraction(kind, n, t) if t < n else max(0, (total - t) / max(1, total - n))

    expected = [low, *(low + (high - low) * factor(t) for t in range(90))]
    assert written(schedule, 91) == pytest.approx(expected, rel=1e-12)


@given(kinds, lengths, st.integers(1, 80), st.floats(0, 0.5), st.floats(0, 0.5))
def test_cosine_equals_its_formula(kind: str, length: int, total: int, start: float, end: float) -> None:
    n = max(2, length)
    schedule = WarmupCosineLR(sgd(0.5), total, start, length, end, kind)

    def ratio(t: int) -> float:
        if t < n:
            return start + (1 - start) * warmup_fraction(kind, n, t)
        p = min(1, (t - n + 1) / max(1, total - n))
        return max(0, end + (1 - end) * (1 + math.cos(math.pi * p)) / 2)

    expected = [0, *(0.5 * ratio(t) for t in range(90))]
    assert written(schedule, 91) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@given(kinds, lengths)
def test_the_warmup_is_monotonic_and_starts_with_two_minimal_steps(kind: str, length: int) -> None:
    rates = written(WarmupLR(sgd(), 0.1, 0.7, length, kind), length + 5)
    assert rates[:2] == [0.1, 0.1]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.7)


@given(lengths, st.integers(2, 80))
def test_decays_end_at_their_minimum_and_stay_there(length: int, total: int) -> None:
    steps = max(total, length, 2) + 3
    assert written(WarmupDecayLR(sgd(), total, 0.1, 0.7, length), steps)[-1] == pytest.approx(0.1)
    assert written(WarmupCosineLR(sgd(0.5), total, 0, length, 0.2), steps)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(("kind", "params"), [
    (WarmupLR, {}), (WarmupDecayLR, {"total_num_steps": 30}), (WarmupCosineLR, {"total_num_steps": 30}),
])  # fmt: skip
@settings(deadline=None)
@given(st.integers(0, 40))
def test_a_resumed_schedule_equals_an_uninterrupted_one(kind: Any, params: dict[str, int], cut: int) -> None:
    whole = written(kind(sgd(), **params, warmup_num_steps=10), 50)
    first, second = (kind(sgd(), **params, warmup_num_steps=10) for _ in range(2))
    head = written(first, cut)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()
    assert head + written(second, 50 - cut) == whole


def test_each_group_rises_to_its_own_rate() -> None:
    schedule = WarmupLR(sgd(0.1, 0.2), warmup_num_steps=3, warmup_type="linear")
    for _ in range(5):
        schedule.step()
    assert [group["lr"] for group in schedule.optimizer.param_groups] == [0.1, 0.2] == schedule.get_last_lr()


def test_limits_may_be_one_per_group() -> None:
    schedule = WarmupLR(sgd(1, 1), [0.1, 0.2], [0.3, 0.4], 2)
    assert schedule.get_lr() == [0.1, 0.2]
    schedule.step(7)
    assert schedule.get_lr() == pytest.approx([0.3, 0.4])
    assert schedule.state_dict() == {"last_batch_iteration": 7}


def test_a_tensor_rate_is_written_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = SGD([torch.zeros(1)], lr=rate)
    WarmupLR(optimizer, 0.125, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125


def test_a_resumed_schedule_keeps_the_rates_until_its_first_step() -> None:
    schedule = WarmupLR(sgd(0.5), 0.0, 0.5, 2, last_batch_iteration=10)
    with pytest.raises(AssertionError, match=r"need to call step\(\) first"):
        schedule.get_last_lr()
    schedule.step()
    assert (schedule.last_batch_iteration, schedule.get_last_lr()) == (11, [0.5])


def test_a_wrapped_optimizer_is_accepted() -> None:
    class Wrapper:
        optimizer = sgd(0.5)

    assert WarmupLR(Wrapper()).optimizer is Wrapper.optimizer  # pyright: ignore


def test_an_object_that_is_not_an_optimizer_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"schedule: got int as the optimizer; give a torch\.optim\.Optimizer"):
        WarmupLR(3)  # pyright: ignore


def test_a_wrong_number_of_limits_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"got \[0\.1, 0\.2, 0\.3\], 3 learning rates for 2 parameter groups"):
        WarmupLR(sgd(1, 1), [0.1, 0.2, 0.3])


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "10"])
def test_steps_must_be_a_positive_whole_number(steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.params\.warmup_num_steps: got .*; give a whole number of steps"):
        WarmupLR(sgd(), warmup_num_steps=steps)
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps: got"):
        WarmupDecayLR(sgd(), steps)


def test_json_numbers_like_1e3_are_whole() -> None:
    assert written(WarmupLR(sgd(), 0, 1, 2.0), 5)[-1] == 1  # pyright: ignore


def test_a_total_below_the_warmup_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal"):
        WarmupDecayLR(sgd(), 70_001, warmup_num_steps=90_001)  # numbers that no other test warns of, which is done once
    assert "total_num_steps: got 70001, less than the warm-up of 90001 steps" in caplog.text


def test_an_unknown_warmup_type_gives_a_warning_and_uses_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal"):
        schedule = WarmupLR(sgd(), warmup_num_steps=5, warmup_type="cubic")
    assert "warmup_type: got 'cubic'; allowed are log and linear" in caplog.text
    assert written(schedule, 9) == written(WarmupLR(sgd(), warmup_num_steps=5, warmup_type="log"), 9)


def test_a_foreign_state_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="the checkpoint lacks last_batch_iteration; it has last_epoch"):
        WarmupLR(sgd()).load_state_dict({"last_epoch": 3})
