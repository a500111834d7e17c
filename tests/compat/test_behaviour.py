"""Published behaviour of one area each: configuration, optimizers, schedules of a pipeline, scalers, helpers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

import shoal.compat.deepspeed as deepspeed
from shoal.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from shoal.compat.deepspeed.runtime.config import DeepSpeedConfig
from shoal.compat.deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from shoal.compat.deepspeed.runtime.pipe.schedule import InferenceSchedule, PipeSchedule, TrainSchedule
from shoal.compat.deepspeed.runtime.utils import PartitionedTensor, partition_balanced, partition_uniform
from shoal.compat.deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from shoal.compat.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from shoal.compat.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from shoal.compat.deepspeed.runtime.zero.tiling import TiledLinear
from shoal.compat.hjson import loads
from shoal.testing import run_ranks

ADAM = {"type": "Adam", "params": {"lr": 0.1}}


# Configuration


def test_lenient_json_has_comments_plain_keys_and_trailing_commas() -> None:
    assert loads('{train_batch_size: 4, # why\n "fp16": {"enabled": false,}, /* c */ name: a b\n list: [1, 2e3,],}') == {
        "train_batch_size": 4, "fp16": {"enabled": False}, "name": "a b", "list": [1, 2000.0]}


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a"', "[1,", "{a:}", '{"a" 1}', '{"a": 1} b'])
def test_broken_lenient_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"line \d+, column \d+|duplicate"):
        loads(text)


def test_sections_refuse_what_the_published_ones_refuse() -> None:
    for wrong in ({"stage": 4}, {"stag": 1}, {"reduce_bucket_size": 5.5}, {"offload_optimizer": {"ratio": 0.5}}):
        with pytest.raises(ValidationError):
            DeepSpeedZeroConfig(**wrong)
    with pytest.raises(AssertionError, match="two spellings"):
        DeepSpeedZeroConfig(cpu_offload=True, offload_optimizer={"device": "cpu"})
    assert DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer.device == "cpu"
    assert DeepSpeedZeroConfig(stage3_prefetch_bucket_size="auto").prefetch_bucket_size == 50_000_000
    assert DeepSpeedZeroConfig(stage=3).overlap_comm
    assert not DeepSpeedZeroConfig(stage=2).overlap_comm


def test_the_configuration_object_solves_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "gradient_accumulation_steps": 2}))
    assert DeepSpeedConfig(str(path)).train_micro_batch_size_per_gpu == 4
    with pytest.raises(AssertionError, match="train_batch_size"):
        DeepSpeedConfig({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 3})
    with pytest.raises(AssertionError, match="missing"):
        DeepSpeedConfig({"gradient_accumulation_steps": 2})
    with pytest.raises(TypeError, match="auto"):
        DeepSpeedConfig({"train_batch_size": "auto"})
    with pytest.raises(ValueError, match="no file"):
        DeepSpeedConfig("missing.json")


def test_nested_sections_of_data_efficiency_have_the_published_defaults() -> None:
    found = DeepSpeedConfig({"train_batch_size": 1, "data_efficiency": {
        "enabled": True, "data_sampling": {"num_epochs": 3}, "data_routing": {"random_ltd": {"layers": 2}}}})
    assert found.data_efficiency_enabled
    assert found.data_efficiency_config == {
        "enabled": True, "seed": 1234, "data_sampling": {
            "enabled": False, "num_epochs": 3, "num_workers": 0, "pin_memory": False,
            "curriculum_learning": {"enabled": False},
            "dynamic_batching": {"enabled": False, "lr_scaling_method": "linear", "min_batch_size": 1,
                                 "max_batch_size": None, "sequence_picking_order": "dataloader", "verbose": False}},
        "data_routing": {"enabled": False, "random_ltd": {
            "enabled": False, "layers": 2, "layer_token_lr_schedule": {"enabled": False}}}}


# Engines


def engines() -> bool:
    """Build engines of several configurations in one process; assert what scripts look at."""
    def build(given: dict[str, Any], **kwargs: Any) -> tuple[Any, Any]:
        built = deepspeed.initialize(model=kwargs.pop("model", None) or nn.Linear(4, 4), config={
            "train_batch_size": 4, **given}, **kwargs)
        return built[0], built[1]

    def train(engine: Any) -> Any:
        dtype = next(engine.module.parameters()).dtype
        loss = engine.backward(engine(torch.ones(4, 4, dtype=dtype)).sum())
        engine.step()
        return loss

    model = nn.Linear(4, 4)
    own = torch.optim.AdamW(model.parameters())
    engine, optimizer = build({}, model=model, optimizer=own)
    assert optimizer is own
    assert isinstance(engine.optimizer, torch.optim.AdamW)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    second, optimizer = build({"optimizer": ADAM}, model=model)
    assert isinstance(optimizer, FusedAdam)
    train(second)
    for zero, kind, inner in (({"stage": 1}, DeepSpeedZeroOptimizer, FusedAdam),
                              ({"stage": 3}, DeepSpeedZeroOptimizer_Stage3, FusedAdam),
                              ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, DeepSpeedZeroOptimizer,
                               DeepSpeedCPUAdam)):
        engine, optimizer = build({"optimizer": ADAM, "zero_optimization": zero, "no_such_key": 1})
        assert isinstance(optimizer, kind)
        assert isinstance(engine.basic_optimizer, inner)
        assert optimizer.rules.native
        assert engine.zero_optimization_stage() == zero["stage"]
        assert "no_such_key" in engine.config
        train(engine)
        engine.destroy()
    engine, optimizer = build({"optimizer": ADAM}, model=nn.Linear(4, 4).bfloat16())
    assert train(engine).dtype == torch.bfloat16
    engine, _ = build({"optimizer": ADAM, "gradient_accumulation_steps": 2, "managed_gradient_accumulation": False})
    train(engine)
    assert engine.was_step_applied()
    for wrong in ({"optimizer": {"type": "Adam", "params": {"momentum": 1}}}, {"train_batch_size": 0}):
        with pytest.raises((AssertionError, ValueError)):
            build(wrong)
    with pytest.raises(AssertionError, match="model is missing"):
        deepspeed.initialize()
    return True


def test_engines_and_optimizers_are_of_the_published_classes() -> None:
    assert run_ranks(1, engines) == [True]


# Pipelines


def grid(schedule: PipeSchedule) -> list[str]:
    return [" ".join(f"{command.name}{command.kwargs.get('buffer_id', '')}" for command in tick) for tick in schedule]


def test_the_published_schedule_of_training_is_1f1b() -> None:
    assert grid(TrainSchedule(micro_batches=2, stages=2, stage_id=1)) == [
        "", "RecvActivation0 LoadMicroBatch0 ForwardPass0", "BackwardPass0",
        "SendGrad0 RecvActivation1 LoadMicroBatch1 ForwardPass1", "BackwardPass1",
        "SendGrad1 ReduceTiedGrads ReduceGrads OptimizerStep"]
    assert [TrainSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [4, 3, 2, 2]


def test_the_published_schedule_of_inference_alternates_two_buffers() -> None:
    assert grid(InferenceSchedule(micro_batches=2, stages=2, stage_id=0)) == [
        "LoadMicroBatch0 ForwardPass0", "LoadMicroBatch1 SendActivation0 ForwardPass1", "SendActivation1"]


@pytest.mark.parametrize(("stages", "count"), [(1, 1), (2, 4), (3, 5), (4, 3)])
def test_every_receive_of_a_schedule_has_its_send_a_tick_before(stages: int, count: int) -> None:
    ticks = [[[command.name for command in tick] for tick in TrainSchedule(count, stages, stage)] for stage in range(stages)]
    for stage, own in enumerate(ticks):
        for tick, names in enumerate(own):
            if "RecvActivation" in names:
                assert "SendActivation" in ticks[stage - 1][tick]
            if "RecvGrad" in names:
                assert "SendGrad" in ticks[stage + 1][tick]


# Helpers


def test_a_dynamic_scaler_waits_halves_and_doubles() -> None:
    scaler = DynamicLossScaler(init_scale=16, scale_window=2, min_scale=1, delayed_shift=2, consecutive_hysteresis=False)
    scales: list[float] = []
    for overflow in (True, False, True, True, False, False):
        scaler.update_scale(overflow)
        scales.append(scaler.cur_scale)
    assert scales == [16, 16, 8, 4, 4, 4]


@pytest.mark.parametrize(("weights", "parts", "borders"), [
    ([1, 1, 1, 1], 2, [0, 2, 4]), ([1, 2, 3, 4, 5], 3, [0, 3, 4, 5]), ([0, 0, 1, 1], 2, [0, 3, 4]),
    ([1] * 7, 3, [0, 3, 5, 7]), ([10, 1, 1, 1, 1, 10], 3, [0, 1, 5, 6]), ([1, 1], 4, [0, 1, 2, 2, 2]),
])
def test_balanced_parts_have_the_smallest_largest_part(weights: list[int], parts: int, borders: list[int]) -> None:
    assert partition_balanced(weights, parts) == borders
    assert partition_uniform(10, 3) == [0, 4, 7, 10]


def partitioned() -> bool:
    whole = torch.arange(7.0).view(1, 7)
    parted = PartitionedTensor(whole, torch.distributed.group.WORLD)
    again = PartitionedTensor.from_meta(parted.to_meta(), parted.data(), torch.distributed.group.WORLD)
    return torch.equal(parted.full(), whole) and torch.equal(again.full(), whole)


def test_a_partitioned_tensor_is_joined_from_its_parts() -> None:
    assert run_ranks(2, partitioned) == [True, True]


def test_tiles_compute_what_the_whole_layer_computes() -> None:
    whole = nn.Linear(7, 5)
    tiled = TiledLinear(7, 5, in_splits=2, out_splits=3, init_linear=whole)
    sample = torch.randn(2, 7)
    assert torch.allclose(tiled(sample), whole(sample), atol=1e-6)
    with pytest.raises(RuntimeError, match="in_splits"):
        TiledLinear(4, 4, in_splits=5)


def test_modules_are_built_on_another_device_in_another_dtype() -> None:
    with deepspeed.OnDevice(torch.bfloat16):
        built = nn.Linear(3, 3)
    assert (built.weight.device.type, built.weight.dtype) == ("meta", torch.bfloat16)


def test_recompute_draws_the_same_numbers_from_named_generators() -> None:
    checkpointing = deepspeed.checkpointing
    checkpointing.model_parallel_cuda_manual_seed(3)
    weight = torch.ones(64, requires_grad=True)

    def drop(given: torch.Tensor) -> torch.Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            return nn.functional.dropout(given * weight, 0.5)

    out = checkpointing.checkpoint(drop, torch.ones(64, requires_grad=True))
    out.sum().backward()
    assert torch.equal(weight.grad, out.detach())
