"""The dtype policy, and where the mean over ranks is divided."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.precision import Policy, dtype_named, policy
from shoal.precision.policy import Averaging, Factors
from shoal.transport.reduction import promoted_dtype, sum_addends
from shoal.zero.placement import master_dtype

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(("flags", "model", "compute", "master"), [
    ({}, FP32, FP32, FP32),
    ({}, FP64, FP64, FP64),
    ({"bf16": True}, FP32, BF16, FP32),
    ({"bf16": True}, BF16, BF16, FP32),
    ({"fp16": True}, FP32, FP16, FP32),
    ({"fp16": True}, FP64, FP16, FP64),
])  # fmt: skip
def test_reduce_and_accumulate_default_to_compute(flags: dict[str, bool], model: torch.dtype, compute: torch.dtype,
                                                  master: torch.dtype) -> None:
    expected = Policy(compute=compute, reduce=compute, accumulate=compute, master=master)
    assert policy(**flags, model_dtype=model) == expected


def test_reduce_and_accumulate_are_set_independently() -> None:
    built = policy(bf16=True, communication_data_type="FP32", grad_accum_dtype="bfloat16")
    assert (built.reduce, built.accumulate) == (FP32, BF16)


@pytest.mark.parametrize("name", ["fp32", "float32", "float", "FP32"])
def test_a_dtype_has_short_and_long_names_in_any_case(name: str) -> None:
    assert dtype_named(name, key="k") == FP32


def test_an_unknown_dtype_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"data_types\.grad_accum_dtype: got 'fp8'; choose one of fp32, float32"):
        policy(grad_accum_dtype="fp8")


def test_fp16_with_bf16_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp16\.enabled and bf16\.enabled: got true for both"):
        policy(fp16=True, bf16=True)


@pytest.mark.parametrize(("flag", "other"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_a_gradient_in_the_other_16_bit_format_is_refused(flag: str, other: str) -> None:
    with pytest.raises(ConfigError, match=f"got {other} with {flag}.enabled; .* choose {flag} or fp32"):
        policy(**{flag: True}, communication_data_type=other)
    with pytest.raises(ConfigError, match=r"data_types\.grad_accum_dtype: got"):
        policy(**{flag: True}, grad_accum_dtype=other)


def test_two_16_bit_formats_beside_fp32_compute_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got fp16 with data_types\.grad_accum_dtype bf16"):
        policy(communication_data_type="fp16", grad_accum_dtype="bf16")


def test_a_16_bit_model_without_its_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bf16\.enabled: got false for a model whose parameters are bf16"):
        policy(model_dtype=BF16)


def test_a_model_of_integers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"its parameters are torch\.int8; training needs fp64, fp32, fp16 or bf16"):
        policy(model_dtype=torch.int8)


# Averaging


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
def test_a_configured_division_holds_for_all_dtypes(averaging: Averaging, before: float, after: float) -> None:
    for accumulate, wire in ((FP32, FP32), (FP32, FP16), (BF16, BF16), (BF16, FP32)):
        assert averaging.factors(4, accumulate=accumulate, wire=wire) == Factors(before=before, after=after)


@pytest.mark.parametrize(("accumulate", "wire", "before"), [
    (FP32, FP32, 1 / 4), (torch.float64, torch.float64, 1 / 4), (FP32, FP16, 1.0), (BF16, FP32, 1.0), (FP16, FP16, 1.0),
])  # fmt: skip
def test_the_default_divides_where_it_is_free_and_exact(accumulate: torch.dtype, wire: torch.dtype, before: float) -> None:
    factors = Averaging().factors(4, accumulate=accumulate, wire=wire)
    assert (factors.before, factors.after) == (before, 1 / (4 * before))


@pytest.mark.parametrize(("accumulate", "wire", "before"), [
    (FP32, FP32, 1 / 4), (FP32, FP16, 1 / 4), (FP16, FP16, 1 / 4), (BF16, BF16, 1 / 4), (BF16, FP32, 1.0),
])  # fmt: skip
def test_a_16_bit_sum_is_of_divided_addends(accumulate: torch.dtype, wire: torch.dtype, before: float) -> None:
    factors = Averaging(wide=False).factors(4, accumulate=accumulate, wire=wire)
    assert (factors.before, factors.after) == (before, 1 / (4 * before))


@pytest.mark.parametrize(("averaging", "before"), [
    (Averaging(wide=False, prescale=False), 1.0), (Averaging(wide=False, predivide=2.0), 1 / 2),
])  # fmt: skip
def test_a_configured_division_holds_for_16_bit_sums(averaging: Averaging, before: float) -> None:
    assert averaging.factors(4, accumulate=FP16, wire=FP16).before == before


@given(st.sampled_from([None, True, False]), st.none() | st.floats(1e-3, 1e3), st.integers(1, 64), st.booleans(),
       st.sampled_from([FP32, FP16, BF16]), st.sampled_from([FP32, FP16, BF16]))
def test_the_product_of_both_factors_is_the_mean(prescale: bool | None, predivide: float | None, addends: int, summed: bool,
                                                 accumulate: torch.dtype, wire: torch.dtype) -> None:
    averaging = Averaging(prescale=prescale, predivide=predivide, times=addends if summed else 1)
    factors = averaging.factors(addends, accumulate=accumulate, wire=wire)
    assert factors.before * factors.after == pytest.approx(1.0 if summed else 1 / addends)
    assert averaging.is_before(accumulate=accumulate, wire=wire) == (factors == Factors(
        before=(1.0 if summed else 1 / addends), after=1.0)) or addends == 1 or summed or predivide is not None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_has_an_fp32_master_and_is_summed_in_fp32(dtype: torch.dtype) -> None:
    assert master_dtype(dtype) == FP32
    target = torch.zeros(4)
    sum_addends(tuple(torch.full((4,), value).to(dtype) for value in (16.0, 1.0, 1.0)), target, 0.5, accumulate=False)
    assert target.tolist() == [9.0] * 4


@pytest.mark.parametrize(("one", "other", "both"), [
    (torch.float8_e4m3fn, FP32, FP32), (BF16, torch.float8_e5m2, BF16), (*[torch.float8_e5m2] * 3,),
    (torch.float8_e4m3fn, torch.float8_e5m2, FP32), (FP16, BF16, FP32), (FP32, FP64, FP64), (torch.uint8, FP16, FP16)])
def test_two_dtypes_promote_to_one_that_holds_both(one: torch.dtype, other: torch.dtype, both: torch.dtype) -> None:
    assert promoted_dtype(one, other) == promoted_dtype(other, one) == both
