"""Published helpers of training loops, against values that the published package gives."""

from __future__ import annotations

import argparse
import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.compat.deepspeed.runtime import config, lr_schedules, utils
from shoal.compat.deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from shoal.compat.deepspeed.runtime.fp16.loss_scaler import (
    CreateLossScaler,
    DynamicLossScaler,
    LossScaleConfig,
    LossScaleProfile,
    LossScaler,
)
from shoal.compat.deepspeed.runtime.pipe import p2p
from shoal.compat.deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from shoal.compat.deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop
from shoal.compat.deepspeed.runtime.sparse_tensor import SparseTensor
from shoal.compat.deepspeed.runtime.zero import utils as utils_of_zero
from shoal.compat.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias
from shoal.compat.deepspeed.utils import logging
from shoal.compat.deepspeed.utils.init_on_device import OnDevice
from shoal.compat.deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean
from shoal.errors import UsageError
from shoal.testing import run_ranks

CURRICULA: list[tuple[dict[str, Any], list[int]]] = [
    ({"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8}},
     [8, 8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64]),
    ({"min_difficulty": 5, "max_difficulty": 61, "schedule_type": "fixed_linear",
      "schedule_config": {"total_curriculum_step": 7, "difficulty_step": 3}}, [6, 12, 21, 27, 36, 45, 51, 60, 61, 61]),
    ({"schedule_type": "fixed_root", "schedule_config": {
        "total_curriculum_step": 9, "difficulty_step": 1, "root_degree": 3}}, [8, 34, 41, 46, 50, 54, 56, 59, 61, 64, 64]),
    ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 16, 64], "max_step": [3, 7]}},
     [8, 8, 8, 8, 16, 16, 16, 16, 64, 64])]


@pytest.mark.parametrize(("given", "difficulties"), CURRICULA)
def test_the_difficulty_of_each_step_is_the_published_one(given: dict[str, Any], difficulties: list[int]) -> None:
    made = CurriculumScheduler({"min_difficulty": 8, "max_difficulty": 64} | given)
    assert [made.get_difficulty(step) for step in range(len(difficulties))] == difficulties
    assert [made.update_difficulty(step) for step in (1, 100, 2)] == [difficulties[1], *[difficulties[-1]] * 2]


def test_a_custom_curriculum_asks_its_function_until_the_largest() -> None:
    made = CurriculumScheduler({"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "custom"})
    with pytest.raises(UsageError, match="set_custom_get_difficulty"):
        made.get_difficulty(3)
    made.set_custom_get_difficulty(lambda step: step * 10)
    assert [made.update_difficulty(step) for step in (3, 9, 1)] == [30, 90, 90]
    assert made.state["current_difficulty"] == 90


@pytest.mark.parametrize(("given", "error"), [
    ({}, AssertionError), ({"schedule_type": "no"}, RuntimeError),
    ({"schedule_type": "fixed_root", "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 1}}, AssertionError),
    ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1], "max_step": [1]}}, AssertionError)])
def test_curricula_without_what_they_need_are_refused(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="curriculum: "):
        CurriculumScheduler({"min_difficulty": 8, "max_difficulty": 64} | given)


BALANCED: list[tuple[list[float], int, list[int]]] = [
    ([1, 2, 3, 4, 5], 2, [0, 3, 5]), ([1] * 10, 3, [0, 4, 7, 10]), ([5, 1, 1, 1], 2, [0, 1, 4]),
    ([1, 2], 4, [0, 1, 2, 2, 2]),
    ([1, 1, 1, 1, 100], 2, [0, 4, 5]), ([0, 0, 0], 2, [0, 2, 3]), ([3, 1, 4, 1, 5, 9, 2, 6], 3, [0, 5, 6, 8])]


@pytest.mark.parametrize(("weights", "parts", "bounds"), BALANCED)
def test_balanced_partitions_are_the_published_ones(weights: list[float], parts: int, bounds: list[int]) -> None:
    assert utils.partition_balanced(weights, parts) == bounds


def test_uniform_partitions_sums_and_texts_are_the_published_ones() -> None:
    assert [utils.partition_uniform(*given) for given in ((10, 3), (2, 4), (9, 2))] == [
        [0, 4, 7, 10], [0, 1, 2, 2, 2], [0, 5, 9]]
    assert utils.prefix_sum_inc([1, 2, 3]) == [1, 3, 6]
    assert utils.call_to_str("f", 1, "a", b=2) == "f(1, 'a', b=2)"
    assert utils.get_global_norm([3.0, 4.0]) == 5.0


def two_parameters() -> list[nn.Parameter]:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first.grad, second.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    return [first, second]


@pytest.mark.parametrize(("norm_type", "norm"), [(2, 5.0), (1, 7.0), (float("inf"), 4.0)])
def test_clipping_returns_the_norm_and_scales_to_the_limit(norm_type: float, norm: float) -> None:
    parameters = two_parameters()
    assert float(utils.clip_grad_norm_(parameters, 1.0, norm_type)) == pytest.approx(norm)
    assert float(utils.clip_grad_norm_(parameters, 100.0, norm_type)) == pytest.approx(1.0, rel=1e-4)


def test_overflow_is_an_infinite_or_missing_number() -> None:
    parameters = two_parameters()
    check = utils.CheckOverflow([parameters])
    assert not check.check() and check.check_using_norm([-1]) and not check.check_using_norm([1.0])
    assert parameters[0].grad is not None
    parameters[0].grad[0] = float("nan")
    assert check.check() and utils.get_grad_norm(parameters) == -1.0


def test_the_dynamic_scale_follows_overflows_as_published() -> None:
    scaler = DynamicLossScaler(2**4, 2, 1, 2, False)
    seen: list[tuple[float, int]] = []
    for overflow in (1, 1, 0, 0, 0, 1, 0, 0, 1, 1, 1):
        scaler.update_scale(bool(overflow))
        seen.append((scaler.cur_scale, scaler.cur_hysteresis))
    assert seen == [(16, 1), (8, 1), (8, 1), (8, 1), (16, 2), (16, 1), (16, 1), (16, 1), (8, 1), (4, 1), (2, 1)]
    lowest = DynamicLossScaler(1, 1000, 1, 1, False)
    with pytest.raises(Exception, match="Current loss scale already at minimum"):
        lowest.update_scale(True)


def test_a_scaler_fits_the_dtype() -> None:
    assert CreateLossScaler(torch.bfloat16, 128.0, True, {}).cur_scale == 1.0
    assert CreateLossScaler(torch.float16, 128.0, False, None).loss_scale == 128.0
    assert CreateLossScaler(torch.float16, 0, True, None).dynamic
    value = torch.ones(1, requires_grad=True)
    LossScaler(4).backward((value * 2).sum())
    assert value.grad is not None and value.grad.tolist() == [8.0]


def an_optimizer(groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(groups)], lr=0.1)


RATES: list[tuple[Any, dict[str, Any], list[float]]] = [
    (lr_schedules.LRRangeTest, {"lr_range_test_step_size": 2, "lr_range_test_step_rate": 5}, [0.0035, 0.006, 0.0085]),
    (lr_schedules.OneCycle, {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3},
     [0.04, 0.07, 0.1, 0.07]),
    (lr_schedules.WarmupLR, {"warmup_num_steps": 4}, [0.0, 0.05, 0.079248, 0.1, 0.1]),
    (lr_schedules.WarmupDecayLR, {"warmup_num_steps": 3, "total_num_steps": 7}, [0.0, 0.000631, 0.001, 0.001, 0.00075]),
    (lr_schedules.WarmupCosineLR, {"warmup_num_steps": 3, "total_num_steps": 7}, [0.0, 0.063093, 0.1, 0.085357, 0.050005]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "given", "rates"), RATES)
def test_a_schedule_writes_the_published_learning_rates(kind: Any, given: dict[str, Any], rates: list[float]) -> None:
    scheduled = kind(an_optimizer(), **given)
    found: list[float] = []
    for _ in rates:
        scheduled.step()
        found += scheduled.get_last_lr()
    assert found == pytest.approx(rates, abs=1e-6)
    assert scheduled.state_dict() == {"last_batch_iteration": len(rates) - 1}


CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}
MOMENTA: list[tuple[dict[str, Any], list[float], list[float]]] = [
    ({"cycle_first_stair_count": 2}, [0.8, 0.9, 0.85, 0.85, 0.8, 0.85], [0.01, 0.055, 0.055, 0.1, 0.055]),
    ({"cycle_first_step_size": 1, "cycle_second_step_size": 0, "decay_step_size": 1, "decay_lr_rate": 1.0,
      "decay_mom_rate": 0.1}, [0.8, 0.9, 0.99, 1.08], [0.01, 0.005, 0.01 / 3]),
    ({"cycle_min_mom": 0.9, "cycle_max_mom": 0.7, "cycle_first_step_size": 0.5}, [0.9, 0.7], [0.01]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "momenta", "rates"), MOMENTA)
def test_a_cycle_moves_the_first_beta_from_its_minimum(given: dict[str, Any], momenta: list[float],
                                                       rates: list[float]) -> None:
    scheduled = lr_schedules.OneCycle(an_optimizer(), **CYCLE | given)
    found, written = [scheduled.optimizer.param_groups[0]["betas"][0]], list[float]()
    for _ in rates:
        scheduled.step()
        found.append(scheduled.optimizer.param_groups[0]["betas"][0])
        written += scheduled.get_last_lr()
    assert found == pytest.approx(momenta) and written == pytest.approx(rates)


def test_a_cycle_leaves_the_momentum_of_sgd_alone() -> None:
    scheduled = lr_schedules.OneCycle(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.5), **CYCLE)
    scheduled.step()
    assert not scheduled.cycle_momentum and scheduled.optimizer.param_groups[0]["momentum"] == 0.5


def test_the_profiles_of_a_loss_scale_have_the_published_defaults() -> None:
    fused, unfused = (LossScaleConfig(torch.float16, True, 1.0, None, profile=profile) for profile in LossScaleProfile)
    assert (fused.cur_scale, fused.min_loss_scale) == (2**32, 1)
    assert (unfused.cur_scale, unfused.min_loss_scale) == (2**16, 0.25)
    assert (fused.cur_iter, fused.last_overflow_iter, fused.scale_window, fused.scale_factor) == (0, -1, 1000, 2.0)
    static = LossScaleConfig(torch.float16, False, 8.0, None)
    assert (static.cur_scale, static.dynamic_loss_scale, static.last_overflow_iter) == (8.0, False, None)
    assert LossScaleConfig(torch.bfloat16, True, 8.0, None).cur_scale == 1.0


def test_schedules_raise_the_published_errors() -> None:
    with pytest.raises(TypeError, match="not a subclass"):
        lr_schedules.WarmupLR(3)
    with pytest.raises(ValueError, match="warmup_num_steps"):
        lr_schedules.WarmupLR(an_optimizer(), warmup_num_steps=0)
    with pytest.raises(AssertionError, match="need to call step"):
        lr_schedules.OneCycle(an_optimizer(), 0.01, 0.1).get_last_lr()
    with pytest.raises(KeyError):
        lr_schedules.WarmupLR(an_optimizer()).load_state_dict({})


def test_flags_describe_a_schedule() -> None:
    args = lr_schedules.add_tuning_arguments(argparse.ArgumentParser()).parse_args(["--lr_schedule", "WarmupLR"])
    config, problem = lr_schedules.get_config_from_args(args)
    assert problem is None and config is not None
    assert config["params"] == {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"}
    assert lr_schedules.get_lr_from_config(config) == (0.001, "")
    assert lr_schedules.get_lr_from_config({}) == (None, "LR schedule type not defined in config")


def test_progressive_layer_drop_falls_from_one_to_theta() -> None:
    drop = ProgressiveLayerDrop(theta=0.5, gamma=0.1)
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    drop.update_state(10)
    assert drop.get_theta() == pytest.approx(0.5 * 2.718281828459045**-1 + 0.5)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (2, 2), (3, 2)])
def test_a_tiled_layer_computes_what_the_whole_layer_does(inputs: int, outputs: int) -> None:
    whole = nn.Linear(7, 5)
    value = torch.rand(3, 7)
    tiled = TiledLinear(7, 5, in_splits=inputs, out_splits=outputs, init_linear=whole)
    assert torch.allclose(tiled(value), whole(value), atol=1e-6)
    with pytest.raises(RuntimeError, match="in_splits"):
        TiledLinear(7, 5, in_splits=8)


class ReturnsBias(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return nn.functional.linear(input, self.weight), self.bias


def test_a_tiled_layer_that_returns_its_bias_joins_output_and_bias() -> None:
    output, bias = TiledLinearReturnBias(6, 4, in_splits=2, out_splits=2, linear_cls=ReturnsBias)(torch.rand(3, 6))
    assert (output.shape, bias.shape) == ((3, 4), (4,))


def test_tensors_made_on_a_device_have_its_dtype() -> None:
    with OnDevice(torch.float16, device="meta"):
        layer, whole = nn.Linear(2, 2), torch.ones(2, dtype=torch.int64)
    assert (layer.weight.dtype, layer.weight.device.type, whole.dtype) == (torch.float16, "meta", torch.int64)
    with OnDevice(torch.bfloat16, enabled=False):
        assert torch.empty(1).dtype == torch.float32


def test_timers_run_once_and_log_what_exists() -> None:
    timers = SynchronizedWallClockTimer()
    timer = timers("a")
    with pytest.raises(AssertionError, match="not started"):
        timer.stop()
    timer.start()
    with pytest.raises(AssertionError, match="already"):
        timer.start()
    timer.stop()
    assert timer.elapsed() >= 0 and timer.elapsed() == 0 and timers.get_mean(["a", "missing"]).keys() == {"a"}
    assert NoopTimer()("a").elapsed() == 0 and NoopTimer().get_timers() == {}
    assert trim_mean([1, 2, 3, 100], 0.25) == 2.5


def test_the_throughput_timer_reports_every_few_steps() -> None:
    lines: list[str] = []
    timer = ThroughputTimer(argparse.Namespace(enabled=True, synchronized=True), batch_size=4, start_step=1,
                            steps_per_output=2, logging_fn=lines.append)
    for _ in range(4):
        timer.start()
        timer.stop(global_step=True)
    assert len(lines) == 2 and "global_step=4" in lines[1] and timer.avg_samples_per_sec() > 0


# Single values of a configuration

WHOLE = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "max_grad_norm": 2.0}},
         "gradient_clipping": 0.5, "communication_data_type": "fp16", "gradient_allreduce_op": "sum",
         "pipeline": {"stages": 2}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@pytest.mark.parametrize(("name", "default", "given"), [
    ("train_batch_size", None, 8), ("optimizer_name", None, "AdamW"), ("optimizer_gradient_clipping", None, 2.0),
    ("gradient_clipping", 1.0, 0.5), ("communication_data_type", None, torch.float16), ("scheduler_params", None, None),
    ("gradient_allreduce_op", "mean", "sum"), ("torch_autocast_dtype", None, torch.bfloat16),
    ("zero_force_ds_cpu_optimizer", True, True), ("checkpoint_params", {}, {})])
def test_a_value_is_read_with_the_published_default(name: str, default: Any, given: Any) -> None:
    read = getattr(config, f"get_{name}")
    assert (read({}), read(WHOLE)) == (default, given)


@pytest.mark.parametrize(("name", "given"), [
    ("communication_data_type", {"communication_data_type": "fp9"}),
    ("gradient_allreduce_op", {"gradient_allreduce_op": "max"}),
    ("checkpoint_tag_validation_mode", {"tag_validation": "x"}),
    ("checkpoint_parallel_write_pipeline", {"parallel_write": {"pipeline_stage": "x"}})])
def test_a_value_that_is_not_allowed_is_a_value_error(name: str, given: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        getattr(config, f"get_{name}")(given)


def test_blocks_of_a_configuration_have_their_defaults() -> None:
    assert config.get_pipeline_config(WHOLE)["stages"] == 2 and config.get_pipeline_config({})["stages"] == "auto"
    assert config.get_hybrid_engine_config({}).max_out_tokens == 512
    assert config.get_checkpoint_tag_validation_mode({"tag_validation": "Fail"}) == "FAIL"


# Logging, and tensors in containers


def test_levels_of_the_logger_have_names(tmp_path: Path) -> None:
    assert logging.get_log_level_from_string("Info") == 20 and logging.get_current_level() == 30
    assert [logging.should_log_le(name) for name in ("info", "warning", "error")] == [False, True, True]
    for wrong in ("foo", 3):
        with pytest.raises(ValueError, match="log level"):
            logging.should_log_le(wrong)  # pyright: ignore[reportArgumentType]
    logging.print_json_dist({"a": 1}, path=str(tmp_path / "f"))
    assert json.loads((tmp_path / "f").read_text()) == {"a": 1, "rank": -1}


def test_tensors_are_found_in_containers_and_moved_into_one_buffer() -> None:
    pair = namedtuple("pair", "one two")
    one = torch.zeros(1)
    found = utils_of_zero.apply_to_tensors_only(lambda each: each + 1, {"a": [one, 3], "b": pair(one, None)})
    assert found["a"][0].item() == 1.0 and type(found["b"]) is pair and found["b"].two is None
    tensors = [torch.ones(2), torch.zeros(3)]
    buffer = utils_of_zero.defragment(tensors)
    tensors[1].fill_(5.0)
    assert buffer.tolist() == [1.0, 1.0, 5.0, 5.0, 5.0]
    assert [(start, size) for _, start, size in utils_of_zero.get_mapping_to_flat_buffer(tensors)] == [(0, 2), (2, 3)]


def passed_along() -> list[float]:
    p2p.init_process_groups(PipelineParallelGrid(topology=PipeDataParallelTopology(2, 1)))
    value = torch.full((2,), float(torch.distributed.get_rank()))
    if torch.distributed.get_rank() == 0:
        p2p.send(value, 1)
        p2p.recv(value, 1, async_op=True)
    else:
        received = torch.empty(2)
        p2p.recv(received, 0)
        p2p.send(received + 7, 0, async_op=True)
    p2p.wait()
    return [*value.tolist(), *utils_of_zero.get_lst_from_rank0([torch.distributed.get_rank() + 3])]


def test_adjacent_stages_send_and_receive() -> None:
    assert run_ranks(2, passed_along) == [[7.0, 7.0, 3], [1.0, 1.0, 3]]


def test_a_sparse_gradient_is_rows_and_their_indices() -> None:
    layer = nn.Embedding(5, 2, sparse=True)
    layer(torch.tensor([1, 3, 1])).sum().backward()
    rows, dense = SparseTensor(layer.weight.grad), torch.tensor([[0., 0], [2, 2], [0, 0], [1, 1], [0, 0]])
    assert rows.indices is not None and rows.indices.tolist() == [1, 3] and rows.sparse_size() == (6, 10)
    assert torch.equal(rows.to_coo_tensor().to_dense(), dense) and "reduction_factor=1.6" in str(rows)
    rows.add(SparseTensor(layer.weight.grad))
    assert torch.equal(rows.to_coo_tensor().to_dense(), 2 * dense)
    with pytest.raises(AssertionError, match="dense"):
        SparseTensor(torch.ones(2, 2))
    with pytest.raises(AssertionError, match="size"):
        rows.add(SparseTensor(torch.sparse_coo_tensor([[0]], [[1.0, 1.0]], (6, 2), check_invariants=True)))
