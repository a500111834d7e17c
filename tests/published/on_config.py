"""Configuration: batch arithmetic, sections and their defaults, what is refused and how."""

from __future__ import annotations

import base64
import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

from .case import case, raised

BATCHES = [
    (32, None, None),
    (32, 16, None),
    (32, None, 2),
    (32, 16, 1),
    (None, 16, None),
    (None, 16, 2),
    (None, None, 2),
    (33, 16, 1),
    (32, 16, 4),
    (0, None, None),
    (32, 0, None),
    (32, None, 0),
    (-8, None, None),
    (7, None, None),
    (2, None, None),
    (None, None, None),
]


def given(total: Any, micro: Any, steps: Any) -> dict[str, Any]:
    keys = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    return {key: value for key, value in keys.items() if value is not None}


def solved(config: Any) -> list[int]:
    return [config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps]


def attempt(config: Any) -> Any:
    try:
        return solved(DeepSpeedConfig(config))
    except AssertionError:
        return "AssertionError"


@case(sizes=BATCHES)
def batch_on_one_rank(sizes: tuple[Any, Any, Any]) -> Any:
    return attempt(given(*sizes))


@case(ranks=2, sizes=BATCHES[:12])
def batch_on_two_ranks(sizes: tuple[Any, Any, Any]) -> Any:
    deepspeed.init_distributed("gloo")
    return attempt(given(*sizes))


TEXTS = {
    "plain": '{"train_batch_size": 4}',
    "comment": '{"train_batch_size": 4 // samples\n}',
    "hash": '{# of a step\n"train_batch_size": 4}',
    "trailing": '{"train_batch_size": 4,}',
    "unquoted": "{train_batch_size: 4}",
    "duplicate": '{"train_batch_size": 4, "train_batch_size": 4}',
    "nested_duplicate": '{"train_batch_size": 4, "fp16": {"enabled": false, "enabled": true}}',
    "no_commas": '{\n"train_batch_size": 4\n"steps_per_print": 2\n}',
    "float": '{"train_batch_size": 4, "gradient_clipping": 1e-1}',
}


@case(text=list(TEXTS))
def file_of(text: str) -> Any:
    Path("ds.json").write_text(TEXTS[text])
    return raised(lambda: DeepSpeedConfig("ds.json")) if "duplicate" in text else solved(DeepSpeedConfig("ds.json"))


@case()
def base64_text() -> Any:
    return solved(DeepSpeedConfig(base64.urlsafe_b64encode(json.dumps({"train_batch_size": 4}).encode()).decode()))


@case(what=["missing.json", "a b c"])
def text_that_is_no_config(what: str) -> Any:
    return raised(lambda: DeepSpeedConfig(what))


@case(what=[1, 1.5, None, ["train_batch_size"]])
def object_that_is_no_config(what: Any) -> Any:
    return raised(lambda: DeepSpeedConfig(what)) != {"raised": []}


@case(
    blocks=[
        "zero_optimization",
        "fp16",
        "bf16",
        "activation_checkpointing",
        "flops_profiler",
        "aio",
        "checkpoint",
        "pipeline",
        "comms_logger",
        "tensorboard",
        "csv_monitor",
        "wandb",
        "hybrid_engine",
        "data_types",
        "timers",
        "no_such_block",
    ]
)
def unknown_key_in(blocks: str) -> Any:
    return raised(lambda: DeepSpeedConfig({"train_batch_size": 1, blocks: {"no_such_key": 1}}))


ZERO_DEFAULTS = [
    "stage",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "offload_param",
    "offload_optimizer",
    "sub_group_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "ignore_unused_parameters",
    "legacy_stage1",
    "round_robin_gradients",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "memory_efficient_linear",
    "pipeline_loading_checkpoint",
    "override_module_apply",
    "cpu_offload",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
]


@case(stage=[0, 1, 2, 3])
def zero_defaults(stage: int) -> Any:
    config = DeepSpeedZeroConfig(stage=stage)
    return {name: getattr(config, name) for name in ZERO_DEFAULTS} | {"stage": int(config.stage)}


ZERO_GIVEN: dict[str, dict[str, Any]] = {
    "prefixed": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 5,
        "stage3_max_live_parameters": 6,
        "stage3_max_reuse_distance": 7,
        "stage3_param_persistence_threshold": 8,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bare": {
        "stage": 3,
        "prefetch_bucket_size": 5,
        "max_live_parameters": 6,
        "max_reuse_distance": 7,
        "param_persistence_threshold": 8,
        "gather_16bit_weights_on_model_save": True,
    },
    "old_name": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True},
    "scientific": {"stage": 2, "reduce_bucket_size": 5e6, "allgather_bucket_size": 1e3},
    "strings": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": "auto"},
    "overlap": {"stage": 3, "overlap_comm": False},
    "overlap1": {"stage": 1, "overlap_comm": True},
}


@case(which=list(ZERO_GIVEN))
def zero_given(which: str) -> Any:
    config = DeepSpeedZeroConfig(**ZERO_GIVEN[which])
    return {name: getattr(config, name) for name in ZERO_DEFAULTS} | {"stage": int(config.stage)}


ZERO_WRONG: dict[str, dict[str, Any]] = {
    "stage4": {"stage": 4},
    "stage_text": {"stage": "two"},
    "negative": {"stage": -1},
    "fraction": {"reduce_bucket_size": 5.5},
    "bucket_below_0": {"reduce_bucket_size": -1},
    "unknown": {"grad_hooks": True},
    "both": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
    "device": {"offload_param": {"device": "tape"}},
    "buffers": {"offload_param": {"device": "cpu", "buffer_count": -1}},
    "ratio": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}},
    "ratio_below": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "sub_group": {"stage": 3, "sub_group_size": -2},
    "live": {"stage": 3, "stage3_max_live_parameters": -1},
    "unknown_offload": {"stage": 3, "offload_param": {"device": "cpu", "speed": 1}},
}


@case(which=list(ZERO_WRONG))
def zero_wrong(which: str) -> Any:
    return raised(lambda: DeepSpeedZeroConfig(**ZERO_WRONG[which]))


@case(key=["cpu_offload", "cpu_offload_param"], value=[True, False])
def deprecated_offload(key: str, value: bool) -> Any:
    config = DeepSpeedZeroConfig(stage=3, **{key: value})
    return {
        name: None if section is None else [str(section.device == "cpu"), section.pin_memory, section.buffer_count]
        for name, section in (("param", config.offload_param), ("optimizer", config.offload_optimizer))
    }


@case(device=["none", "cpu", "nvme"])
def offload_sections(device: str) -> Any:
    config = DeepSpeedZeroConfig(
        stage=3,
        offload_param={"device": device, "nvme_path": "/tmp"},
        offload_optimizer={"device": device, "nvme_path": "/tmp", "pipeline_read": True},
    )
    one, two = config.offload_param, config.offload_optimizer
    return [
        one.device == device,
        str(one.nvme_path),
        one.buffer_count,
        one.buffer_size,
        one.max_in_cpu,
        one.pin_memory,
        two.device == device,
        two.buffer_count,
        two.pin_memory,
        two.pipeline,
        two.pipeline_read,
        two.pipeline_write,
        two.fast_init,
        two.ratio,
    ]


@case(given=[True, False])
def boolean_zero(given: bool) -> Any:
    return raised(lambda: DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": given}))


TOP: dict[str, Any] = {
    "gradient_clipping": 0.5,
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "steps_per_print": 7,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "dump_state": True,
    "disable_allgather": True,
    "dataloader_drop_last": True,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "vocabulary_size": 8,
    "communication_data_type": "fp16",
    "seq_parallel_communication_data_type": "BF16",
}
ATTRIBUTES = [
    "gradient_clipping",
    "prescale_gradients",
    "gradient_predivide_factor",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "disable_allgather",
    "dataloader_drop_last",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "optimizer_name",
    "optimizer_params",
    "scheduler_name",
    "scheduler_params",
    "zero_enabled",
    "zero_optimization_stage",
    "load_universal_checkpoint",
    "use_node_local_storage",
    "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail",
    "gradient_allreduce_op",
    "managed_gradient_accumulation",
    "grad_accum_dtype",
]


@case(key=["defaults", *TOP])
def top_level(key: str) -> Any:
    config = DeepSpeedConfig({"train_batch_size": 1} | ({key: TOP[key]} if key in TOP else {}))
    return {name: getattr(config, name) for name in ATTRIBUTES}


@case(key=["communication_data_type", "seq_parallel_communication_data_type"], value=["fp64", "int"])
def wrong_dtype(key: str, value: Any) -> Any:
    return raised(lambda: DeepSpeedConfig({"train_batch_size": 1, key: value}))


@case(name=["Adam", "ADAMW", "lamb", "Lion", "SGD", "sgd", "Muon", "adagrad", "Mine"])
def optimizer_names(name: str) -> Any:
    config = DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": name, "params": {"lr": 1}}})
    return [config.optimizer_name, config.optimizer_params, config.optimizer_legacy_fusion]


@case(section=["fp16", "bf16"])
def precision_defaults(section: str) -> Any:
    config = DeepSpeedConfig({"train_batch_size": 1, section: {"enabled": True}})
    half, brain = config.float16_config, config.bfloat16_config
    return [
        half.enabled,
        half.auto_cast,
        half.loss_scale,
        half.initial_scale_power,
        half.loss_scale_window,
        half.hysteresis,
        half.consecutive_hysteresis,
        half.min_loss_scale,
        half.fp16_master_weights_and_grads,
        half.initial_dynamic_scale(),
        half.dynamic_loss_scale_args(),
        brain.enabled,
        brain.immediate_grad_update,
        brain.check_grad_overflow,
    ]


@case(
    given=[
        {"loss_scale": -1},
        {"loss_scale": float("inf")},
        {"loss_scale": True},
        {"loss_scale_window": 0},
        {"min_loss_scale": 0},
        {"initial_scale_power": -1},
        {"hysteresis": 0},
        {"hysteresis": -1},
        {"speed": 1},
        {"enabled": "maybe"},
    ]
)
def fp16_wrong(given: dict[str, Any]) -> Any:
    return raised(lambda: DeepSpeedConfig({"train_batch_size": 1, "fp16": {"enabled": True, **given}}))


@case(
    keys=[
        {"fp16": {"enabled": True, "loss_scale_window": 10, "hysteresis": 3, "initial_scale_power": 8, "min_loss_scale": 2}},
        {"fp16": {"enabled": True, "initial_scale_power": 4}},
        {"fp16": {"enabled": True, "loss_scale": 128}},
    ]
)
def loss_scale_arguments(keys: dict[str, Any]) -> Any:
    half = DeepSpeedConfig({"train_batch_size": 1, **keys}).float16_config
    return [half.initial_dynamic_scale(), half.dynamic_loss_scale_args(), half.loss_scale]


@case()
def fp16_beside_bf16() -> Any:
    return raised(lambda: DeepSpeedConfig({"train_batch_size": 1, "fp16": {"enabled": True}, "bf16": {"enabled": True}}))


@case(value=["Ignore", "warn", "FAIL", "foo", ""])
def tag_validation(value: str) -> Any:
    config = {"train_batch_size": 1, "checkpoint": {"tag_validation": value}}
    if value in ("foo", ""):
        return raised(lambda: DeepSpeedConfig(config))
    found = DeepSpeedConfig(config)
    return [found.checkpoint_tag_validation_enabled, found.checkpoint_tag_validation_fail]


@case(value=[True, False, "yes", 2])
def parallel_write(value: Any) -> Any:
    config = {"train_batch_size": 1, "checkpoint": {"parallel_write": {"pipeline_stage": value}}}
    return raised(lambda: DeepSpeedConfig(config))


@case()
def activation_checkpointing_section() -> Any:
    section = DeepSpeedConfig(
        {"train_batch_size": 1, "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 3}}
    ).activation_checkpointing_config
    return [
        section.partition_activations,
        section.contiguous_memory_optimization,
        section.cpu_checkpointing,
        section.number_checkpoints,
        section.synchronize_checkpoint_boundary,
        section.profile,
    ]


@case()
def monitor_sections() -> Any:
    found = DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": {"enabled": True, "output_path": "x", "job_name": "y"}})
    monitor = found.monitor_config
    return [
        monitor.csv_monitor.enabled,
        monitor.csv_monitor.output_path,
        monitor.csv_monitor.job_name,
        monitor.tensorboard.enabled,
        monitor.tensorboard.output_path,
        monitor.tensorboard.job_name,
        monitor.wandb.enabled,
        monitor.wandb.group,
        monitor.wandb.team,
        monitor.wandb.project,
        monitor.comet.enabled,
        monitor.comet.samples_log_interval,
        monitor.comet.project,
    ]


@case(
    block=[
        {},
        {"enabled": True},
        {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"], "verbose": True, "debug": True},
    ]
)
def comms_section(block: dict[str, Any]) -> Any:
    section = DeepSpeedConfig({"train_batch_size": 1, "comms_logger": block}).comms_config
    return [
        section.comms_logger_enabled,
        *(
            [
                section.comms_logger.prof_all,
                section.comms_logger.prof_ops,
                section.comms_logger.verbose,
                section.comms_logger.debug,
            ]
            if section.comms_logger_enabled
            else []
        ),
    ]


@case()
def aio_and_pipeline_and_flops() -> Any:
    found = DeepSpeedConfig(
        {
            "train_batch_size": 1,
            "aio": {"queue_depth": 16},
            "pipeline": {"seed_layers": True},
            "flops_profiler": {"enabled": True, "profile_step": 3},
        }
    )
    flops = found.flops_profiler_config
    return [
        found.aio_config,
        found.pipeline,
        flops.enabled,
        flops.recompute_fwd_factor,
        flops.profile_step,
        flops.module_depth,
        flops.top_modules,
        flops.detailed,
        flops.output_file,
    ]


@case(
    args=[
        [],
        ["--deepspeed"],
        ["--deepspeed", "--deepspeed_config", "a.json"],
        ["--deepspeed_config=b"],
        ["--deepscale"],
        ["--deepscale_config", "c"],
        ["--own", "3", "--deepspeed"],
    ]
)
def command_line(args: list[str]) -> Any:
    parser = ArgumentParser()
    parser.add_argument("--own", type=int, default=1)
    return {
        key: value
        for key, value in vars(deepspeed.add_config_arguments(parser).parse_args(args)).items()
        if key != "deepspeed_mpi"
    }


@case()
def command_line_refuses_unknown_options() -> Any:
    parser = deepspeed.add_config_arguments(ArgumentParser())
    return raised(lambda: parser.parse_args(["--deepspeed", "yes", "--no-such"]))


@case(key=["elasticity", "sparse_attention", "progressive_layer_drop", "no_such", "quantize_training"])
def dict_is_not_changed(key: str) -> Any:
    config = {"train_batch_size": 1, "x": {"y": 1}}
    before = json.dumps(config)
    DeepSpeedConfig(config)
    return json.dumps(config) == before


@case(value=["auto", "4", [4], 4.0])
def batch_of_another_type(value: Any) -> Any:
    return raised(lambda: DeepSpeedConfig({"train_batch_size": value}))


@case(form=["dict", "path", "config_params", "args", "base64"])
def initialize_takes(form: str) -> Any:
    config = {"train_batch_size": 2, "gradient_accumulation_steps": 2, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    Path("ds.json").write_text(json.dumps(config))
    parser = deepspeed.add_config_arguments(ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    args.local_rank = 0
    text = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    keywords: dict[str, Any] = {
        "dict": {"config": config},
        "path": {"config": "ds.json"},
        "config_params": {"config_params": config},
        "args": {"args": args},
        "base64": {"config": text},
    }[form]
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), **keywords)
    return [
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        optimizer is not None,
        loader,
        scheduler,
        optimizer.param_groups[0]["lr"],
    ]


@case(wrong=["none", "both", "no_model", "optimizer", "no_config_file", "dist_init", "same_twice"])
def initialize_refuses(wrong: str) -> Any:
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 1.0, "torch_adam": True}}}
    Path("ds.json").write_text(json.dumps(config))
    args = deepspeed.add_config_arguments(ArgumentParser()).parse_args(["--deepspeed_config", "ds.json"])
    model = nn.Linear(2, 1)
    calls: dict[str, dict[str, Any]] = {
        "none": {"model": model},
        "both": {"model": model, "args": args, "config": config},
        "no_model": {"config": config},
        "optimizer": {"model": model, "config": {"train_batch_size": 1}, "optimizer": "Adam"},
        "no_config_file": {"model": model, "config": "nowhere.json"},
        "dist_init": {"config": config, "model": None},
        "same_twice": {"model": model, "config": config, "model_parameters": [model.weight, model.weight]},
    }
    return raised(lambda: deepspeed.initialize(**calls[wrong]))


WRONG_TRAINING: dict[str, dict[str, Any]] = {
    "max_grad_norm": {"optimizer": {"type": "Adam", "params": {"lr": 1.0, "max_grad_norm": 1, "torch_adam": True}}},
    "unknown_optimizer": {"optimizer": {"type": "Nonesuch", "params": {}}},
    "lower_case": {"optimizer": {"type": "sgd", "params": {"lr": 1}}},
    "zero_without": {"zero_optimization": {"stage": 1}},
    "zero2_without": {"zero_optimization": {"stage": 2}},
    "untested": {"zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}},
    "scheduler": {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "scheduler": {"type": "Nonesuch", "params": {}}},
    "no_params": {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "scheduler": {"type": "WarmupLR"}},
    "accumulation": {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "data_types": {"grad_accum_dtype": "bf16"}},
    "accumulation_name": {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "data_types": {"grad_accum_dtype": "int3"}},
    "prescale2": {
        "zero_optimization": {"stage": 2},
        "prescale_gradients": True,
        "optimizer": {"type": "Adam", "params": {"lr": 1.0, "torch_adam": True}},
    },
    "predivide2": {
        "zero_optimization": {"stage": 2},
        "gradient_predivide_factor": 2.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1.0, "torch_adam": True}},
    },
    "allreduce_op": {"gradient_allreduce_op": "max", "optimizer": {"type": "SGD", "params": {"lr": 1.0}}},
    "sum3": {
        "gradient_allreduce_op": "sum",
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 1.0, "torch_adam": True}},
    },
    "unknown_parameter": {"optimizer": {"type": "SGD", "params": {"lr": 1.0, "speed": 1}}},
    "warmup_steps": {
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
    },
}


@case(which=list(WRONG_TRAINING))
def training_refused(which: str) -> Any:
    return raised(
        lambda: deepspeed.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1, **WRONG_TRAINING[which]})
    )
