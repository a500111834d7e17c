"""The loss scale: its update rule, its bounds, and resuming."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import CheckpointError, ConfigError, LossScaleError
from shoal.precision import DynamicScale, StaticScale, make_loss_scale

rules = st.fixed_dictionaries({
    "initial_scale_power": st.integers(2, 20), "loss_scale_window": st.integers(1, 5),
    "hysteresis": st.integers(1, 4), "consecutive_hysteresis": st.booleans(),
    "min_loss_scale": st.sampled_from([0.25, 1.0, 3.0]),
})  # fmt: skip
steps = st.lists(st.booleans(), max_size=60)


def feed(scale: DynamicScale, overflows: list[bool]) -> list[float]:
    values: list[float] = []
    for overflow in overflows:
        try:
            scale.update(overflow)
        except LossScaleError:
            return values
        values.append(scale.value)
    return values


@given(rules, steps)
def test_a_step_halves_keeps_or_doubles_the_scale_above_the_minimum(rule: dict[str, Any], overflows: list[bool]) -> None:
    before = 2.0 ** rule["initial_scale_power"]
    for overflow, value in zip(overflows, feed(DynamicScale(**rule), overflows), strict=False):
        assert value in ({before, max(before / 2, rule["min_loss_scale"])} if overflow else {before, before * 2})
        before = value


@given(rules, steps)
def test_the_scale_doubles_at_the_clean_step_after_each_window(rule: dict[str, Any], overflows: list[bool]) -> None:
    clean, before = 0, 2.0 ** rule["initial_scale_power"]
    for overflow, value in zip(overflows, feed(DynamicScale(**rule), overflows), strict=False):
        assert (value > before) == (not overflow and clean > 0 and clean % rule["loss_scale_window"] == 0)
        clean, before = (0 if overflow else clean + 1), value


@given(rules, steps, st.integers(0, 60))
def test_a_resumed_scale_continues_as_if_never_stopped(rule: dict[str, Any], overflows: list[bool], cut: int) -> None:
    whole = feed(DynamicScale(**rule), overflows)
    first, second = DynamicScale(**rule), DynamicScale(**rule)
    cut = min(cut, len(whole))
    head = feed(first, overflows[:cut])
    second.load_state_dict(first.state_dict())
    assert head + feed(second, overflows[cut:]) == whole


def test_hysteresis_tolerates_overflows_before_it_halves() -> None:
    scale = DynamicScale(initial_scale_power=4, hysteresis=3)
    assert feed(scale, [True, False, True, True, True]) == [16, 16, 16, 8, 4]


def test_consecutive_hysteresis_refills_on_every_clean_step() -> None:
    scale = DynamicScale(initial_scale_power=4, hysteresis=2, consecutive_hysteresis=True)
    assert feed(scale, [True, False, True, False, True, True]) == [16, 16, 16, 16, 16, 8]


def test_hysteresis_refills_when_the_scale_grows() -> None:
    scale = DynamicScale(initial_scale_power=4, hysteresis=2, loss_scale_window=2)
    assert feed(scale, [True, False, False, False, True, True]) == [16, 16, 16, 32, 32, 16]


def test_overflow_at_the_smallest_scale_raises_with_step_scale_and_advice() -> None:
    scale = DynamicScale(initial_scale_power=1, hysteresis=1, min_loss_scale=1)
    feed(scale, [False, True])
    with pytest.raises(LossScaleError, match=r"step 2: .* overflow at loss scale 1, .*fp16\.min_loss_scale.*bf16"):
        scale.update(True)
    assert scale.value == 1


def test_a_static_scale_ignores_overflow() -> None:
    scale = StaticScale(128)
    scale.update(True)
    scale.load_state_dict(scale.state_dict())
    assert scale.value == 128


def test_zero_means_dynamic_and_a_positive_number_means_static() -> None:
    assert isinstance(make_loss_scale(loss_scale=0), DynamicScale)
    assert make_loss_scale(loss_scale=64).value == 64
    assert make_loss_scale(initial_scale_power=3).value == 8


def test_a_dynamic_scale_restarts_from_the_state_of_a_static_one() -> None:
    scale = DynamicScale(initial_scale_power=5)
    scale.load_state_dict(StaticScale(3).state_dict())
    assert scale.value == 32


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan"), True])
def test_a_static_scale_must_be_finite_and_positive(value: float) -> None:
    with pytest.raises(ConfigError, match=r"fp16\.loss_scale: got .*; it must be a finite number above 0"):
        StaticScale(value)


def test_the_smallest_scale_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"fp16\.min_loss_scale: got 0"):
        DynamicScale(min_loss_scale=0)


@pytest.mark.parametrize("key", ["loss_scale_window", "hysteresis"])
def test_counts_start_at_one(key: str) -> None:
    with pytest.raises(ConfigError, match=f"fp16.{key}: got 0; it must be an integer of 1 or more"):
        DynamicScale(**{key: 0})


def test_the_first_scale_must_reach_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"fp16\.initial_scale_power: got 2, a scale of 4; .*\(8\)"):
        DynamicScale(initial_scale_power=2, min_loss_scale=8)


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the checkpoint lacks clean, patience, steps, value; it has scale"):
        DynamicScale().load_state_dict({"scale": 1})
