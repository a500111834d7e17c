"""Every published key is honoured, accepted while it requests nothing, or rejected by name; none is ignored."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from shoal import log
from shoal.engine.schema import Config
from shoal.errors import ConfigError, NotSupportedYet

HONOURED = "honoured"
LATER = "later"
WARNED = "warned"
REFUSED = "refused"
SILENT = "silent"

# path, the published default (None: none), a value that requests something, and the fate of that value
KEYS: list[tuple[str, Any, Any, str]] = [
    ("train_batch_size", None, 8, HONOURED),
    ("train_micro_batch_size_per_gpu", None, 2, HONOURED),
    ("gradient_accumulation_steps", None, 2, HONOURED),
    ("optimizer.type", None, "AdamW", HONOURED),
    ("optimizer.params", {}, {"lr": 0.1}, HONOURED),
    ("optimizer.legacy_fusion", False, True, WARNED),
    ("scheduler.type", None, "WarmupLR", HONOURED),
    ("scheduler.params", {}, {"warmup_num_steps": 5}, HONOURED),
    ("zero_allow_untested_optimizer", False, True, HONOURED),
    ("zero_force_ds_cpu_optimizer", True, False, SILENT),
    ("gradient_clipping", 1.0, 0.5, HONOURED),
    ("prescale_gradients", False, True, HONOURED),
    ("gradient_predivide_factor", 1.0, 2.0, HONOURED),
    ("communication_data_type", None, "fp32", HONOURED),
    ("gradient_allreduce_op", "mean", "sum", HONOURED),
    ("sparse_gradients", False, True, HONOURED),
    ("disable_allgather", False, True, WARNED),
    ("dataloader_drop_last", False, True, HONOURED),
    ("vocabulary_size", None, 64, HONOURED),
    ("fp16.enabled", False, True, HONOURED),
    ("fp16.auto_cast", False, True, HONOURED),
    ("fp16.loss_scale", 0, 128, HONOURED),
    ("fp16.initial_scale_power", 16, 8, HONOURED),
    ("fp16.loss_scale_window", 1000, 10, HONOURED),
    ("fp16.hysteresis", 2, 1, HONOURED),
    ("fp16.consecutive_hysteresis", False, True, HONOURED),
    ("fp16.min_loss_scale", 1, 0.5, HONOURED),
    ("fp16.fp16_master_weights_and_grads", False, True, LATER),
    ("bf16.enabled", False, True, HONOURED),
    ("bf16.immediate_grad_update", False, True, SILENT),
    ("bf16.check_grad_overflow", True, False, HONOURED),
    ("bf16.bf16_master_weights_and_grads", False, True, LATER),
    ("bf16.bf16_optimizer_states", False, True, LATER),
    ("amp.enabled", False, True, LATER),
    ("data_types.grad_accum_dtype", None, "fp32", HONOURED),
    ("zero_optimization.stage", 0, 3, HONOURED),
    ("zero_optimization.contiguous_gradients", True, False, WARNED),
    ("zero_optimization.reduce_scatter", True, False, WARNED),
    ("zero_optimization.reduce_bucket_size", 5e8, 5e6, HONOURED),
    ("zero_optimization.use_multi_rank_bucket_allreduce", True, False, WARNED),
    ("zero_optimization.allgather_partitions", True, False, WARNED),
    ("zero_optimization.allgather_bucket_size", 5e8, 5e6, HONOURED),
    ("zero_optimization.overlap_comm", True, False, HONOURED),
    ("zero_optimization.load_from_fp32_weights", True, False, LATER),
    ("zero_optimization.elastic_checkpoint", False, True, SILENT),
    ("zero_optimization.ignore_unused_parameters", True, False, HONOURED),
    ("zero_optimization.round_robin_gradients", False, True, WARNED),
    ("zero_optimization.legacy_stage1", False, True, REFUSED),
    ("zero_optimization.grad_hooks", None, True, REFUSED),
    ("zero_optimization.sub_group_size", 1e9, 1e6, HONOURED),
    ("zero_optimization.stage3_max_live_parameters", 1e9, 1e6, HONOURED),
    ("zero_optimization.stage3_max_reuse_distance", 1e9, 1e6, HONOURED),
    ("zero_optimization.stage3_prefetch_bucket_size", 5e7, 0, HONOURED),
    ("zero_optimization.stage3_param_persistence_threshold", 1e5, 1e3, HONOURED),
    ("zero_optimization.stage3_model_persistence_threshold", 2**63 - 1, 1e3, HONOURED),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", False, True, HONOURED),
    ("zero_optimization.memory_efficient_linear", True, False, WARNED),
    ("zero_optimization.override_module_apply", True, False, WARNED),
    ("zero_optimization.offload_param.device", "none", "cpu", HONOURED),
    ("zero_optimization.offload_param.nvme_path", None, "/tmp", HONOURED),
    ("zero_optimization.offload_param.buffer_count", 5, 2, HONOURED),
    ("zero_optimization.offload_param.buffer_size", 1e8, 1e6, HONOURED),
    ("zero_optimization.offload_param.max_in_cpu", 0, 1e9, HONOURED),
    ("zero_optimization.offload_param.pin_memory", True, False, HONOURED),
    ("zero_optimization.offload_optimizer.device", "none", "cpu", HONOURED),
    ("zero_optimization.offload_optimizer.nvme_path", None, "/tmp", HONOURED),
    ("zero_optimization.offload_optimizer.buffer_count", 4, 2, HONOURED),
    ("zero_optimization.offload_optimizer.pin_memory", True, False, HONOURED),
    ("zero_optimization.offload_optimizer.pipeline_read", True, False, HONOURED),
    ("zero_optimization.offload_optimizer.pipeline_write", True, False, HONOURED),
    ("zero_optimization.offload_optimizer.ratio", 1.0, 0.5, HONOURED),
    ("zero_optimization.offload_optimizer.fast_init", False, True, SILENT),
    ("zero_optimization.offload_optimizer.super_offload", False, True, LATER),
    ("aio.block_size", 1048576, 4096, HONOURED),
    ("aio.queue_depth", 8, 16, HONOURED),
    ("aio.intra_op_parallelism", 1, 2, HONOURED),
    ("aio.single_submit", False, True, SILENT),
    ("aio.overlap_events", True, False, SILENT),
    ("aio.use_gds", False, True, LATER),
    ("activation_checkpointing.partition_activations", False, True, HONOURED),
    ("activation_checkpointing.cpu_checkpointing", False, True, HONOURED),
    ("activation_checkpointing.contiguous_memory_optimization", False, True, WARNED),
    ("activation_checkpointing.number_checkpoints", None, 4, WARNED),
    ("activation_checkpointing.synchronize_checkpoint_boundary", False, True, WARNED),
    ("activation_checkpointing.profile", False, True, WARNED),
    ("sparse_attention.mode", "fixed", "dense", HONOURED),
    ("sparse_attention.block", 16, 64, HONOURED),
    ("sparse_attention.different_layout_per_head", False, True, HONOURED),
    ("sparse_attention.num_local_blocks", 4, 8, HONOURED),
    ("sparse_attention.num_global_blocks", 1, 2, HONOURED),
    ("sparse_attention.attention", "bidirectional", "unidirectional", HONOURED),
    ("sparse_attention.horizontal_global_attention", False, True, HONOURED),
    ("pipeline.stages", "auto", 4, HONOURED),
    ("pipeline.partition", "best", "uniform", WARNED),
    ("pipeline.seed_layers", False, True, WARNED),
    ("pipeline.activation_checkpoint_interval", 0, 1, HONOURED),
    ("pipeline.pipe_partitioned", True, False, WARNED),
    ("pipeline.grad_partitioned", True, False, WARNED),
    ("pipeline.use_reentrant", True, False, SILENT),
    ("progressive_layer_drop.enabled", False, True, LATER),
    ("steps_per_print", None, 10, HONOURED),
    ("wall_clock_breakdown", False, True, LATER),
    ("memory_breakdown", False, True, LATER),
    ("dump_state", False, True, HONOURED),
    ("log_level", None, "info", HONOURED),
    ("timers.throughput.enabled", True, False, SILENT),
    ("timers.throughput.synchronized", True, False, SILENT),
    ("flops_profiler.enabled", False, True, LATER),
    ("tensorboard.enabled", False, True, LATER),
    ("wandb.enabled", False, True, LATER),
    ("csv_monitor.enabled", False, True, LATER),
    ("comms_logger.enabled", False, True, HONOURED),
    ("comms_logger.prof_all", True, False, HONOURED),
    ("comms_logger.prof_ops", [], ("all_reduce",), HONOURED),
    ("comms_logger.verbose", False, True, HONOURED),
    ("comms_logger.debug", False, True, HONOURED),
    ("checkpoint.tag_validation", "Warn", "Fail", HONOURED),
    ("checkpoint.load_universal", False, True, SILENT),
    ("checkpoint.use_node_local_storage", False, True, LATER),
    ("checkpoint.parallel_write.pipeline_stage", False, True, LATER),
    ("elasticity.max_train_batch_size", 2000, 12, HONOURED),
    ("elasticity.micro_batch_sizes", [2, 4, 6], [1, 2], HONOURED),
    ("elasticity.prefer_larger_batch", True, False, HONOURED),
    ("elasticity.version", 0.2, 0.1, HONOURED),
    ("autotuning.enabled", False, True, LATER),
]

# Keys that mean nothing while their block is off: they pass beside the switch, and a mistyped one does not.
BEHIND_A_SWITCH = {
    "progressive_layer_drop": ["theta", "gamma"],
    "flops_profiler": [*("recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file")],
    "tensorboard": ["output_path", "job_name"],
    "wandb": ["group", "team", "project"],
    "csv_monitor": ["output_path", "job_name"],
    "autotuning": [
        *("fast", "results_dir", "exps_dir", "overwrite", "start_profile_step", "end_profile_step", "metric"),
        *("metric_path", "tuner_type", "tuner_early_stopping", "tuner_num_trials", "arg_mappings", "mp_size"),
        *("max_train_batch_size", "min_train_batch_size", "max_train_micro_batch_size_per_gpu"),
        *("min_train_micro_batch_size_per_gpu", "num_tuning_micro_batch_sizes", "model_info", "model_info_path"),
    ],
}


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_warned", set[str]())


def at(path: str, value: Any) -> dict[str, Any]:
    """Return a configuration with `value` at `path` and what it needs beside it."""
    config: dict[str, Any] = {}
    inner = config
    *sections, key = path.split(".")
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    if key == "params" and value:
        inner["type"] = "Adam"
    config.setdefault("train_micro_batch_size_per_gpu", 1)
    return config


def looked_up(config: Config, path: str) -> Any:
    value: Any = config.as_dict()
    for key in path.split("."):
        value = value[key]
    return value


@pytest.mark.parametrize(("path", "default", "asks", "fate"), KEYS, ids=[key[0] for key in KEYS])
def test_a_published_key_has_the_stated_fate(
    path: str, default: Any, asks: Any, fate: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="shoal"):
        if default is not None:
            Config.resolve(at(path, default), data_ranks=1)
        assert not caplog.records
        if fate in (LATER, REFUSED):
            with pytest.raises(ConfigError, match=f"^{path.rpartition('.')[0] or path}") as raised:
                Config.resolve(at(path, asks), data_ranks=1)
            assert isinstance(raised.value, NotSupportedYet) == (fate == LATER)
        else:
            config = Config.resolve(at(path, asks), data_ranks=1)
            assert fate != HONOURED or looked_up(config, path) == asks
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ([path] if fate == WARNED else [])


@pytest.mark.parametrize(("block", "key"), [(block, key) for block, keys in BEHIND_A_SWITCH.items() for key in keys])
def test_a_disabled_block_accepts_known_keys_and_rejects_unknown_ones(block: str, key: str) -> None:
    Config.resolve(at(block, {"enabled": False, key: "anything"}), data_ranks=1)
    with pytest.raises(ConfigError, match="unknown key; did you mean"):
        Config.resolve(at(block, {"enabled": False, key + "x": "anything"}), data_ranks=1)


@pytest.mark.parametrize("block", [*BEHIND_A_SWITCH, "elasticity", "sparse_attention", "zero_optimization.offload_param",
                                   "amp", "aio", "activation_checkpointing", "pipeline", "timers"])
def test_a_block_of_null_or_auto_requests_nothing(block: str) -> None:
    Config.resolve(at(block, None), data_ranks=1)
    Config.resolve(at(block, "auto"), data_ranks=1)


OLD_OFFLOAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "optimizer": ({"cpu_offload": True}, "offload_optimizer", "offload_param"),
    "weights": ({"cpu_offload_param": True, "cpu_offload_use_pin_memory": False}, "offload_param", "offload_optimizer"),
}


@pytest.mark.parametrize("given", OLD_OFFLOAD)
def test_the_old_form_of_offload_means_host_offload(given: str) -> None:
    old, block, other = OLD_OFFLOAD[given]
    config = Config.resolve(at("zero_optimization", old), data_ranks=1)
    zero = config.as_dict()["zero_optimization"]
    assert (zero[block]["device"], zero[other]["device"]) == ("cpu", "none")
    assert zero[block]["pin_memory"] is old.get("cpu_offload_use_pin_memory", True)
    assert config.origins[f"zero_optimization.{block}.device"] == f"given as '{next(iter(old))}'"


def test_old_and_new_forms_of_offload_together_are_rejected() -> None:
    with pytest.raises(ConfigError, match="cpu_offload: an old form of offload_optimizer, which stands beside it; remove"):
        Config.resolve(at("zero_optimization", {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}), data_ranks=1)
    Config.resolve(at("zero_optimization", {"cpu_offload": False, "offload_optimizer": {"device": "cpu"}}), data_ranks=1)


@pytest.mark.parametrize("block", ["offload_param", "offload_optimizer"])
def test_a_disk_needs_a_folder(block: str) -> None:
    with pytest.raises(ConfigError, match=f"{block}.device: got 'nvme' without nvme_path; give the folder of a fast"):
        Config.resolve(at(f"zero_optimization.{block}", {"device": "nvme"}), data_ranks=1)


def test_the_documented_name_of_disk_threads_is_an_alias() -> None:
    assert Config.resolve(at("aio.thread_count", 3), data_ranks=1).aio.intra_op_parallelism == 3


def test_a_block_with_a_switch_can_be_set_to_false() -> None:
    Config.resolve(at("flops_profiler", False), data_ranks=1)
    with pytest.raises(NotSupportedYet, match=r"^flops_profiler: got true; not supported yet"):
        Config.resolve(at("flops_profiler", True), data_ranks=1)


def test_the_keys_that_accelerate_adds_request_nothing() -> None:
    config = Config.resolve(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "none", "nvme_path": None},
                "offload_param": {"device": "none", "nvme_path": None},
                "stage3_gather_16bit_weights_on_model_save": False,
            },
            "steps_per_print": float("inf"),
            "fp16": {"enabled": True, "auto_cast": True},
            "bf16": {"enabled": False},
            "zero_allow_untested_optimizer": True,
            "msamp": {"enabled": True, "opt_level": "O2"},
        },
        data_ranks=2,
    )
    assert config.train_batch_size == 16


PUBLISHED_FORMS = {
    "a first example": """{
      "train_batch_size": 8,
      "gradient_accumulation_steps": 1,
      "steps_per_print": 1,
      "zero_optimization": true,
      "disable_allgather": false,
      "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "betas": [0.9, 0.999], "eps": 1e-8}},
      "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
      "prescale_gradients": false, "wall_clock_breakdown": false
    }""",
    "stage 2 with comments": """{
      // half precision
      "fp16": {"enabled": "auto", "initial_scale_power": 16},
      "zero_optimization": {
        "stage": 2,
        "allgather_partitions": true, "allgather_bucket_size": 2e8,  # elements
        "overlap_comm": true,
        "reduce_scatter": true, "reduce_bucket_size": 2e8,
        "contiguous_gradients": true, /* as ever */
      },
      "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
      "steps_per_print": 2000,
      "train_batch_size": 16, "train_micro_batch_size_per_gpu": "auto",
    }""",
    "stage 3 with everything auto": """{
      "bf16": {"enabled": true},
      "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": "auto"}},
      "zero_optimization": {
        "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
        "offload_param": {"device": "none", "pin_memory": true},
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true
      },
      "activation_checkpointing": {"partition_activations": false, "number_checkpoints": null},
      "flops_profiler": {"enabled": false, "profile_step": 1, "module_depth": -1, "top_modules": 1},
      "tensorboard": {"enabled": false, "output_path": "logs", "job_name": "run"},
      "train_micro_batch_size_per_gpu": 4, "train_batch_size": "auto",
      "wall_clock_breakdown": false
    }""",
}


@pytest.mark.parametrize("text", PUBLISHED_FORMS.values(), ids=PUBLISHED_FORMS)
def test_a_published_configuration_file_resolves(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    config = Config.resolve(file, data_ranks=2)
    assert config.batch.total == config.train_batch_size
    assert Config.resolve(json.loads(json.dumps(config.as_dict())), data_ranks=2).as_dict() == config.as_dict()


@pytest.mark.parametrize("section", ["curriculum_learning", "data_efficiency"])
def test_the_refusal_of_a_curriculum_names_its_scheduler(section: str) -> None:
    with pytest.raises(NotSupportedYet, match=rf'^{section}: .*"enabled": false, and .*CurriculumScheduler'):
        Config.resolve(at(f"{section}.enabled", True), data_ranks=1)
