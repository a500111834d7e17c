"""Every configuration value has an origin, and every problem is reported in one line with key, value and fix."""

import contextlib
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import log
from shoal.config.batch import BatchSizes
from shoal.config.problem import nearest
from shoal.config.resolve import nested
from shoal.engine.schema import Config
from shoal.errors import ConfigError, NotSupportedYet

BATCH = {"train_micro_batch_size_per_gpu": 1}


def resolve(**keys: Any) -> Config:
    return Config.resolve({**BATCH, **keys}, data_ranks=2, data_ranks_origin="a test")


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_warned", set[str]())


REFUSED = {
    "a stage that does not exist": (
        {"zero_optimization": {"stage": 4}},
        "zero_optimization.stage: got 4; choose 0, 1, 2 or 3",
    ),
    "an unknown key of a section": (
        {"zero_optimization": {"stag": 1}},
        "zero_optimization.stag: unknown key; did you mean 'stage'?",
    ),
    "an unknown key of the top level": (
        {"gradient_cliping": 1},
        "gradient_cliping: unknown key; did you mean 'gradient_clipping'?",
    ),
    "an unknown key like no other": ({"xyzzy": 1}, "xyzzy: unknown key; `shoal config reference` lists them all"),
    "an unknown key of a small section": ({"scheduler": {"xyzzy": 1}}, "scheduler.xyzzy: unknown key; choose type, params"),
    "a key in the wrong place": ({"stage": 1}, "stage: unknown key here; did you mean 'zero_optimization.stage'?"),
    "an unknown key of a later block": (
        {"flops_profiler": {"enabled": False, "modul_depth": 1}},
        "flops_profiler.modul_depth: unknown key; did you mean 'module_depth'?",
    ),
    "two spellings": (
        {"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 1}},
        "zero_optimization.max_live_parameters: is another spelling of 'stage3_max_live_parameters', which is given "
        "too; keep 'stage3_max_live_parameters'",
    ),
    "two old spellings": (
        {
            "zero_optimization": {
                "gather_16bit_weights_on_model_save": True,
                "stage3_gather_fp16_weights_on_model_save": True,
            }
        },
        "zero_optimization.stage3_gather_fp16_weights_on_model_save: is another spelling of "
        "'stage3_gather_16bit_weights_on_model_save', which is given too; keep 'stage3_gather_16bit_weights_on_model_save'",
    ),
    "both names of bf16": (
        {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}},
        "bfloat16: is another spelling of 'bf16', which is given too; keep 'bf16'",
    ),
    "a fraction for a whole number": ({"train_batch_size": 5.5}, "train_batch_size: got 5.5; give a whole number"),
    "a switch for a whole number": ({"train_batch_size": True}, "train_batch_size: got true; give a whole number"),
    "text for a whole number": ({"train_batch_size": "8"}, 'train_batch_size: got "8"; give a whole number'),
    "no samples": ({"train_batch_size": 0}, "train_batch_size: got 0; give a number greater than 0"),
    "a negative count": (
        {"zero_optimization": {"stage3_max_reuse_distance": -1}},
        "zero_optimization.stage3_max_reuse_distance: got -1; give a number of at least 0",
    ),
    "text for a switch": ({"dump_state": "yes"}, 'dump_state: got "yes"; choose true or false'),
    "a number for text": ({"optimizer": {"type": 3}}, "optimizer.type: got 3; give a string"),
    "a value for a section": ({"fp16": True}, "fp16: got true; give a JSON object"),
    "a value for parameters": ({"optimizer": {"type": "SGD", "params": 3}}, "optimizer.params: got 3; give a JSON object"),
    "a negative loss scale": ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale: got -1; give a number of at least 0"),
    "a loss scale that is no number": (
        {"fp16": {"loss_scale": float("nan")}},
        "fp16.loss_scale: got NaN; give a finite number",
    ),
    "a switch for the loss scale": ({"fp16": {"loss_scale": False}}, "fp16.loss_scale: got false; give a number"),
    "no lowest loss scale": ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale: got 0; give a number greater than 0"),
    "no window": ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window: got 0; give a number greater than 0"),
    "a scale beyond fp32": (
        {"fp16": {"initial_scale_power": 128}},
        "fp16.initial_scale_power: got 128; give a number of at most 127",
    ),
    "a lowest loss scale above the first": (
        {"fp16": {"min_loss_scale": 8, "initial_scale_power": 2}},
        "fp16.min_loss_scale: got 8, above the first scale 2^2; lower it or raise initial_scale_power",
    ),
    "fp16 with bf16": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled: got true beside bf16.enabled; choose one",
    ),
    "a dtype that does not exist": (
        {"data_types": {"grad_accum_dtype": "fp8"}},
        "data_types.grad_accum_dtype: got \"fp8\"; choose 'fp16', 'bf16' or 'fp32'",
    ),
    "accumulation in the other half type": (
        {"data_types": {"grad_accum_dtype": "half"}, "bf16": {"enabled": True}},
        "data_types.grad_accum_dtype: got 'fp16' beside bf16 gradients; choose 'fp32' or 'bf16'",
    ),
    "accumulation below fp32": (
        {"data_types": {"grad_accum_dtype": "bf16"}},
        "data_types.grad_accum_dtype: got 'bf16' beside fp32 gradients; choose 'fp32'",
    ),
    "an old form beside its key": (
        {"fp32_allreduce": True, "communication_data_type": "fp16"},
        "fp32_allreduce: an old form of communication_data_type, which stands beside it; remove the old form",
    ),
    "an old form that is no switch": (
        {"fp32_allreduce": "yes"},
        'fp32_allreduce: got "yes"; write "communication_data_type": "fp32"',
    ),
    "allgather_size without the form it belongs to": (
        {"allgather_size": 5e8},
        "allgather_size: got 500000000.0; write zero_optimization.allgather_bucket_size",
    ),
    "the first form of stage 1": (
        {"zero_optimization": {"legacy_stage1": True}},
        'zero_optimization.legacy_stage1: got true; it is gone; write "stage": 1',
    ),
    "a key that only documents had": (
        {"zero_optimization": {"grad_hooks": True}},
        "zero_optimization.grad_hooks: got true; it never had a meaning; remove it",
    ),
    "clipping by the optimizer": (
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm: no optimizer clips by itself; write gradient_clipping at the top level instead",
    ),
    "parameters without an optimizer": (
        {"optimizer": {"params": {"lr": 1}}},
        "optimizer.type: missing beside params; name an optimizer such as 'AdamW'",
    ),
    "parameters without a schedule": (
        {"scheduler": {"params": {"warmup_num_steps": 1}}},
        "scheduler.type: missing beside params; name a schedule such as 'WarmupLR'",
    ),
    "an unknown tag rule": (
        {"checkpoint": {"tag_validation": "maybe"}},
        "checkpoint.tag_validation: got \"maybe\"; choose 'Ignore', 'Warn' or 'Fail'",
    ),
    "no checkpoint to keep": ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last: got 0; give a number greater than 0"),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_an_error_names_path_value_allowed_values_and_fix(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(**keys)
    assert str(raised.value) == message
    assert not isinstance(raised.value, NotSupportedYet)


LATER = {
    "a key": (
        {"wall_clock_breakdown": True},
        "wall_clock_breakdown: got true; not supported yet (time forward, backward and step); remove it or give false",
    ),
    "a block with a switch": (
        {"flops_profiler": {"enabled": True}},
        'flops_profiler: not supported yet (the FLOPs profiler); remove the block or give "enabled": false',
    ),
    "a key of a block": (
        {"aio": {"use_gds": True}},
        "aio.use_gds: got true; not supported yet (copy between disk and GPU directly); remove it or give false",
    ),
    "a block of any keys": (
        {"compression_training": {"layer_reduction": {}}},
        "compression_training: not supported yet (pruning and quantization during training); remove it",
    ),
}


@pytest.mark.parametrize(("keys", "message"), LATER.values(), ids=LATER)
def test_a_key_of_a_later_version_raises_not_supported_yet(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupportedYet) as raised:
        resolve(**keys)
    assert str(raised.value) == message


def test_all_problems_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "wrong.json"
    wrong = {
        "train_batch_size": 7,
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 4, "stag": 1, "zero_quantized_weights": True},
        "steps_per_print": 5.5,
    }
    file.write_text(json.dumps(wrong))
    with pytest.raises(ConfigError) as raised:
        Config.resolve(file, data_ranks=2)
    first, *lines = str(raised.value).splitlines()
    assert first == f"{file}: 6 problems in the configuration"
    assert [line.split(":")[0].strip() for line in lines] == [
        "fp16.enabled",
        "steps_per_print",
        "train_batch_size",
        "zero_optimization.stag",
        "zero_optimization.stage",
        "zero_optimization.zero_quantized_weights",
    ]


def test_a_conflict_with_a_rejected_value_is_not_reported() -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(data_types={"grad_accum_dtype": "fp16"}, fp16={"enabled": "yes"})
    assert str(raised.value) == 'fp16.enabled: got "yes"; choose true or false'


def test_a_single_problem_is_prefixed_with_the_file_name(tmp_path: Path) -> None:
    file = tmp_path / "wrong.json"
    file.write_text('{"train_batch_size": 2, "stag": 1}')
    with pytest.raises(ConfigError) as raised:
        Config.resolve(str(file), data_ranks=1)
    assert str(raised.value).startswith(f"{file}: stag: unknown key")


def test_the_batch_is_resolved_with_its_origin() -> None:
    config = Config.resolve(
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"},
        data_ranks=2,
        data_ranks_origin="a test",
    )
    assert config.batch == BatchSizes(micro=4, accumulation=4, data_ranks=2)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (32, 4)
    assert config.origins["train_batch_size"] == "given"
    assert config.origins["gradient_accumulation_steps"] == "derived (32 / (4 x 2 data ranks))"


def test_every_derived_batch_key_names_its_sources() -> None:
    assert resolve().origins["train_batch_size"] == "derived (1 x 1 x 2 data ranks)"
    assert resolve().origins["gradient_accumulation_steps"] == "derived (nothing asks for more than one)"
    config = Config.resolve({"train_batch_size": 8}, data_ranks=1)
    assert config.origins["train_micro_batch_size_per_gpu"] == "derived (8 / (1 x 1 data rank))"


def test_without_data_ranks_the_batch_stays_as_given() -> None:
    config = Config.resolve({"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}, data_ranks=None)
    assert config.zero_optimization.stage == 3
    assert config.train_batch_size is None


def test_auto_means_not_given_and_the_origin_says_so() -> None:
    config = resolve(
        gradient_clipping="auto",
        bf16="auto",
        zero_optimization={"stage": 3, "reduce_bucket_size": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}},
    )
    assert config.gradient_clipping == 1.0
    assert config.optimizer.params == {"eps": 1e-8}
    assert config.origins["gradient_clipping"] == "auto (default)"
    assert config.origins["zero_optimization.reduce_bucket_size"] == "auto (default)"
    assert config.origins["zero_optimization.stage"] == "given"
    assert config.origins["optimizer.params.eps"] == "given"
    assert config.origins["fp16.enabled"] == "default"


def test_every_value_has_an_origin() -> None:
    config = resolve(optimizer={"type": "SGD", "params": {"lr": 1.0}})
    flat = {path for path in config.origins}
    assert {"optimizer.type", "optimizer.params.lr", "scheduler.params", "checkpoint.async_save", "timeout"} <= flat


def test_an_old_spelling_sets_the_value_and_the_origin_names_it() -> None:
    config = resolve(zero_optimization={"prefetch_bucket_size": 5e7}, bfloat16={"enabled": True})
    assert config.zero_optimization.stage3_prefetch_bucket_size == 50_000_000
    assert config.bf16.enabled
    assert config.origins["zero_optimization.stage3_prefetch_bucket_size"] == "given as 'prefetch_bucket_size'"


@pytest.mark.parametrize(("form", "stage"), [(True, 1), (False, 0)])
def test_the_oldest_form_of_zero_is_a_switch_for_stage_1(form: bool, stage: int) -> None:
    config = resolve(zero_optimization=form, allgather_size=5e8)
    assert config.zero_optimization.stage == stage
    assert config.zero_optimization.allgather_bucket_size == 500_000_000
    assert config.origins["zero_optimization.stage"] == f"given as 'zero_optimization': {str(form).lower()}"
    assert config.origins["zero_optimization.allgather_bucket_size"] == "given as 'allgather_size'"


@pytest.mark.parametrize("old", ["fp32_allreduce", "allreduce_always_fp32"])
def test_the_oldest_switch_for_fp32_reduction_sets_its_dtype(old: str) -> None:
    config = resolve(**{old: True})
    assert config.communication_data_type == "fp32"
    assert config.origins["communication_data_type"] == f"given as '{old}'"
    assert resolve(**{old: False}).communication_data_type is None


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [("FP16", "fp16"), ("half", "fp16"), ("bfloat16", "bf16"), ("BF16", "bf16"), ("float", "fp32"), ("Float32", "fp32")],
)
def test_dtypes_have_several_spellings_in_any_case(spelling: str, dtype: str) -> None:
    assert resolve(communication_data_type=spelling).communication_data_type == dtype


def test_whole_numbers_are_accepted_in_any_numeric_form() -> None:
    config = resolve(zero_optimization={"stage": 2.0, "reduce_bucket_size": 5e8}, train_batch_size=np.int64(4))
    assert (config.zero_optimization.stage, config.zero_optimization.reduce_bucket_size) == (2, 500_000_000)
    assert type(config.train_batch_size) is int


@pytest.mark.parametrize("never", [float("inf"), None])
def test_an_infinite_interval_means_never(never: float | None) -> None:
    assert resolve(steps_per_print=never).steps_per_print is None


def test_the_compute_dtype_follows_the_switches() -> None:
    assert resolve().compute_dtype == "fp32"
    assert resolve(fp16={"enabled": True}).compute_dtype == "fp16"
    assert resolve(bf16={"enabled": True}).compute_dtype == "bf16"


def test_the_first_loss_scale_is_a_power_of_two_or_the_static_one() -> None:
    assert resolve(fp16={"initial_scale_power": 8}).fp16.initial_scale == 256.0
    static = resolve(fp16={"loss_scale": 128}).fp16
    assert (static.dynamic, static.initial_scale) == (False, 128.0)


def test_an_inert_switch_gives_one_warning_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="shoal"):
        resolve(zero_optimization={"stage": 2, "contiguous_gradients": False, "reduce_scatter": True})
        resolve(zero_optimization={"stage": 2, "contiguous_gradients": False})
    assert [record.getMessage() for record in caplog.records] == [
        "zero_optimization.contiguous_gradients: got false; gradients of a unit always rest in one buffer; it has no effect"
    ]


def test_a_vocabulary_size_not_divisible_by_8_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="shoal"):
        resolve(vocabulary_size=50257)
        resolve(vocabulary_size=50264)
    assert [record.getMessage() for record in caplog.records] == [
        "vocabulary_size: got 50257, no multiple of 8; pad it to 50264 for speed"
    ]


def test_the_callers_dict_is_not_modified() -> None:
    source: dict[str, Any] = {"train_batch_size": 2, "zero_optimization": True, "allgather_size": 1, "fp32_allreduce": True}
    before = json.dumps(source)
    Config.resolve(source, data_ranks=1)
    assert json.dumps(source) == before


def test_settings_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        resolve().zero_optimization.stage = 1  # type: ignore[misc]


def test_a_configuration_survives_pickling() -> None:
    config = resolve(zero_optimization={"stage": 3})
    restored = pickle.loads(pickle.dumps(config))
    assert restored == config
    assert restored.batch == config.batch
    assert restored.origins == config.origins


@given(
    stage=st.integers(0, 3),
    precision=st.sampled_from([{}, {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}]),
    accumulation=st.integers(1, 8),
    lr=st.floats(0, 1),
    print_every=st.none() | st.integers(1, 100) | st.just(float("inf")),
)
def test_a_resolved_configuration_resolves_to_itself(
    stage: int, precision: dict[str, Any], accumulation: int, lr: float, print_every: float | None
) -> None:
    config = resolve(
        zero_optimization={"stage": stage},
        gradient_accumulation_steps=accumulation,
        optimizer={"type": "AdamW", "params": {"lr": lr}},
        steps_per_print=print_every,
        **precision,
    )
    text = json.dumps(config.as_dict())
    assert Config.resolve(json.loads(text), data_ranks=2).as_dict() == config.as_dict()


WORDS = sorted(
    [
        *(Config.model_fields.keys() | Config.published.keys() | Config.aliases.keys()),
        *(key for section in nested(Config).values() for key in section.model_fields.keys() | section.published.keys()),
        *("device", "enabled", "betas", "auto"),
    ]
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
)


@given(st.dictionaries(st.sampled_from(WORDS), ODD, max_size=5))
def test_any_configuration_resolves_or_raises_a_config_error(odd: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        config = Config.resolve({**BATCH, **odd}, data_ranks=2)
        assert Config.resolve(config.as_dict(), data_ranks=2).as_dict() == config.as_dict()


def test_parameters_may_contain_objects_that_json_cannot_represent() -> None:
    betas = np.array([0.9, 0.95])
    config = resolve(optimizer={"type": "Adam", "params": {"betas": betas, "fused": None}})
    assert config.optimizer.params["betas"] is betas
    with pytest.raises(NotSupportedYet, match=r"^wall_clock_breakdown: got array"):
        resolve(wall_clock_breakdown=betas)


@given(st.sampled_from(["train_batch_size", "gradient_clipping", "zero_optimization"]), st.data())
def test_one_wrong_letter_still_finds_the_nearest_key(word: str, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(word) - 1))
    typo = word[:index] + data.draw(st.sampled_from("abcxyz")) + word[index + 1 :]
    assert nearest(typo, Config.model_fields) == word
