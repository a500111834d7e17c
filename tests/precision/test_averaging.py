"""Where the mean over ranks is divided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.precision.averaging import Averaging, Factors

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(("averaging", "before", "after"), [
    (Averaging(prescale=True), 1 / 4, 1.0),
    (Averaging(prescale=False), 1.0, 1 / 4),
    (Averaging(predivide=2.0), 1 / 2, 2 / 4),
    (Averaging(predivide=1.0), 1.0, 1 / 4),
    (Averaging(prescale=True, predivide=1.0), 1 / 4, 1.0),
    (Averaging(prescale=False, predivide=8.0), 1 / 8, 8 / 4),
    (Averaging(times=4), 1.0, 1.0),
    (Averaging(times=4, predivide=2.0), 1 / 2, 2.0),
])  # fmt: skip
def test_what_is_asked_for_holds_in_every_dtype(averaging: Averaging, before: float, after: float) -> None:
    for accumulate, wire in ((FP32, FP32), (FP32, FP16), (BF16, BF16), (BF16, FP32)):
        assert averaging.factors(4, accumulate=accumulate, wire=wire) == Factors(before=before, after=after)


@pytest.mark.parametrize(("accumulate", "wire", "before"), [
    (FP32, FP32, 1 / 4), (torch.float64, torch.float64, 1 / 4), (FP32, FP16, 1.0), (BF16, FP32, 1.0), (FP16, FP16, 1.0),
])  # fmt: skip
def test_what_is_left_open_is_divided_where_it_is_free_and_loses_nothing(accumulate: torch.dtype, wire: torch.dtype,
                                                                         before: float) -> None:
    found = Averaging().factors(4, accumulate=accumulate, wire=wire)
    assert (found.before, found.after) == (before, 1 / (4 * before))


@pytest.mark.parametrize(("accumulate", "wire", "before"), [
    (FP32, FP32, 1 / 4), (FP32, FP16, 1 / 4), (FP16, FP16, 1 / 4), (BF16, BF16, 1 / 4), (BF16, FP32, 1.0),
])  # fmt: skip
def test_a_sum_that_is_taken_in_16_bits_is_one_of_divided_addends(accumulate: torch.dtype, wire: torch.dtype,
                                                                  before: float) -> None:
    found = Averaging(wide=False).factors(4, accumulate=accumulate, wire=wire)
    assert (found.before, found.after) == (before, 1 / (4 * before))


@pytest.mark.parametrize(("averaging", "before"), [
    (Averaging(wide=False, prescale=False), 1.0), (Averaging(wide=False, predivide=2.0), 1 / 2),
])  # fmt: skip
def test_what_is_asked_for_holds_wherever_the_sum_is_taken(averaging: Averaging, before: float) -> None:
    assert averaging.factors(4, accumulate=FP16, wire=FP16).before == before


@given(st.sampled_from([None, True, False]), st.none() | st.floats(1e-3, 1e3), st.integers(1, 64), st.booleans(),
       st.sampled_from([FP32, FP16, BF16]), st.sampled_from([FP32, FP16, BF16]))
def test_both_factors_together_are_the_mean(prescale: bool | None, predivide: float | None, addends: int, summed: bool,
                                            accumulate: torch.dtype, wire: torch.dtype) -> None:
    averaging = Averaging(prescale=prescale, predivide=predivide, times=addends if summed else 1)
    found = averaging.factors(addends, accumulate=accumulate, wire=wire)
    assert found.before * found.after == pytest.approx(1.0 if summed else 1 / addends)
    assert averaging.is_before(accumulate=accumulate, wire=wire) == (found == Factors(
        before=(1.0 if summed else 1 / addends), after=1.0)) or addends == 1 or summed or predivide is not None
