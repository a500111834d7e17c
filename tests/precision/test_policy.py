"""Laws of the dtype policy."""

import pytest
import torch

from shoal.errors import ConfigError
from shoal.precision import Policy, dtype_named, policy

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(("flags", "model", "compute", "master"), [
    ({}, FP32, FP32, FP32),
    ({}, FP64, FP64, FP64),
    ({"bf16": True}, FP32, BF16, FP32),
    ({"bf16": True}, BF16, BF16, FP32),
    ({"fp16": True}, FP32, FP16, FP32),
    ({"fp16": True}, FP64, FP16, FP64),
])  # fmt: skip
def test_gradients_follow_compute_unless_told(flags: dict[str, bool], model: torch.dtype, compute: torch.dtype,
                                              master: torch.dtype) -> None:
    expected = Policy(compute=compute, reduce=compute, accumulate=compute, master=master)
    assert policy(**flags, model_dtype=model) == expected


def test_reduce_and_accumulate_are_chosen_apart() -> None:
    chosen = policy(bf16=True, communication_data_type="FP32", grad_accum_dtype="bfloat16")
    assert (chosen.reduce, chosen.accumulate) == (FP32, BF16)


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
