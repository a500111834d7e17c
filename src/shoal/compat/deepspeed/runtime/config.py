"""The published configuration object: the JSON under the published attribute names, with the published errors.

It says what a script reads (`engine._config.zero_config.stage`). What Shoal does is said by Shoal's own configuration,
which `shoal.compat.tolerance` derives from the same JSON.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.compat.config_reads import *  # noqa: F403
from shoal.compat.config_reads import REDUCTIONS, TAG_MODES, get_sparse_attention
from shoal.compat.deepspeed import __version__
from shoal.compat.deepspeed.comm.config import DeepSpeedCommsConfig
from shoal.compat.deepspeed.elasticity.elasticity import (
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    refuse_other_batch,
)
from shoal.compat.deepspeed.monitor.config import get_monitor_config
from shoal.compat.deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from shoal.compat.deepspeed.runtime import constants
from shoal.compat.deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from shoal.compat.deepspeed.runtime.config_utils import (
    DeepSpeedConfigModel,
    ScientificNotationEncoder,
    dict_raise_error_on_duplicate_keys,
)
from shoal.compat.deepspeed.runtime.config_utils import get_scalar_param as get_scalar_param
from shoal.compat.deepspeed.runtime.data_pipeline.config import get_data_efficiency_config, get_data_efficiency_enabled
from shoal.compat.deepspeed.runtime.model_checkpointing.config import get_checkpoint_config as get_checkpoint_config
from shoal.compat.deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from shoal.compat.deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from shoal.compat.deepspeed.runtime.zero.config import get_zero_config
from shoal.compat.deepspeed.utils.config import get_timers_config
from shoal.compat.deepspeed.utils.logging import logger
from shoal.compat.hjson import loads
from shoal.errors import ConfigError
from shoal.precision.policy import DTYPES

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DEEPSPEED_OPTIMIZERS",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUON_OPTIMIZER",
    "ONEBIT_ADAM_OPTIMIZER",
    "ONEBIT_LAMB_OPTIMIZER",
    "ZERO_ONE_ADAM_OPTIMIZER",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedConfigWriter",
    "DtypeEnum",
    "HybridEngineConfig",
]

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = "onebitadam", "onebitlamb", "zerooneadam"
MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER = "muadam", "muadamw", "musgd"
DEEPSPEED_OPTIMIZERS = [ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, ONEBIT_ADAM_OPTIMIZER,
                        ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER]


def __getattr__(name: str) -> object:
    """Return a constant: scripts import the keys and defaults from here too."""
    if name.isupper() and name in vars(constants):
        return vars(constants)[name]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


class DeepSpeedConfigError(ConfigError):
    """A value of the configuration that is not allowed."""


class DtypeEnum(Enum):
    """A dtype under any of its spellings: `DtypeEnum("half") is DtypeEnum.fp16`."""

    fp16 = torch.float16, "torch.float16", "fp16", "float16", "half"
    fp32 = torch.float32, "torch.float32", "fp32", "float32", "float"
    int8 = torch.int8, "torch.int8", "int8"
    bf16 = torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16"

    _spellings: tuple[Any, ...]

    def __new__(cls, *values: Any) -> DtypeEnum:
        self = object.__new__(cls)
        self._value_ = values[0]
        for other in values[1:]:
            cls._value2member_map_[other] = self
        self._spellings = values
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {', '.join(map(repr, self._spellings))}>"


class HybridEngineConfig(DeepSpeedConfigModel):
    """The block `hybrid_engine`."""

    enabled: bool = False
    max_out_tokens: int = 512
    inference_tp_size: int = 1
    release_inference_cache: bool = False
    pin_parameters: bool = True
    tp_gather_partition_size: int = 8
    enable_cuda_graph: bool = False


def get_hybrid_engine_config(param_dict: dict[str, Any]) -> HybridEngineConfig:
    """Return the block `hybrid_engine` with its defaults."""
    return HybridEngineConfig(**param_dict.get("hybrid_engine", {}))


class DeepSpeedConfigWriter:
    """Collects keys, and writes them as JSON."""

    def __init__(self, data: dict[str, Any] | None = None):
        self.data = {} if data is None else data

    def add_config(self, key: str, value: Any) -> None:
        """Set one key."""
        self.data[key] = value

    def load_config(self, filename: str) -> None:
        """Take the keys of a JSON file; raises `ValueError` for duplicate ones."""
        self.data = json.loads(Path(filename).read_text(), object_pairs_hook=dict_raise_error_on_duplicate_keys)

    def write_config(self, filename: str) -> None:
        """Write the keys as a JSON file."""
        Path(filename).write_text(json.dumps(self.data))


def read_config(config: Any) -> dict[str, Any]:
    """Return the JSON object of a dict, of a file, or of URL-safe base64; comments and unquoted keys are allowed.

    Raises `ValueError` for text that is neither a file nor base64, and for duplicate keys.
    """
    if isinstance(config, dict):
        return config
    if isinstance(config, str | os.PathLike) and Path(config).is_file():
        return _object(Path(config).read_text(encoding="utf-8-sig"), str(config))
    expected = "give a path that exists, a dict, or URL-safe base64 of JSON"
    try:
        text = base64.urlsafe_b64decode(config).decode("utf-8")  # pyright: ignore[reportArgumentType]  a path raises TypeError
    except binascii.Error as error:
        raise binascii.Error(f"config: got {config!r}, which is no file and no base64 ({error}); {expected}") from None
    except (UnicodeDecodeError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"config: got {config!r}; {expected}") from error
    return _object(text, "the base64 text")


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = loads(text)
    except ValueError as error:
        raise DeepSpeedConfigError(f"{where}: {error}") from None
    if not isinstance(found, dict):
        raise DeepSpeedConfigError(f"{where}: holds a {type(found).__name__}; give an object: {{...}}")
    return found


class DeepSpeedConfig:
    """The configuration under its published attribute names. `config` is a path, a dict, or base64 of JSON."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None):
        self._param_dict: dict[str, Any] = read_config(config)
        started = dist.is_available() and dist.is_initialized()
        self.global_rank = dist.get_rank() if started else 0
        ranks = dist.get_world_size() if started else 1
        self.world_size: int = ranks if mpu is None else mpu.get_data_parallel_world_size()
        if mpu is None:
            self.world_size //= self._param_dict.get("sequence_parallel_size") or 1
        self._read_batch(self._param_dict)
        self._read_training(self._param_dict)
        self._read_sections(self._param_dict)
        self._read_checkpoint(self._param_dict.get("checkpoint", {}))
        self._solve_batch()
        self._check()

    def _read_batch(self, given: dict[str, Any]) -> None:
        self.train_batch_size = given.get("train_batch_size")
        self.train_micro_batch_size_per_gpu = given.get("train_micro_batch_size_per_gpu")
        self.gradient_accumulation_steps = given.get("gradient_accumulation_steps")
        self.managed_gradient_accumulation: bool = given.get("managed_gradient_accumulation", True)
        self.elasticity_enabled = elasticity_enabled(given)
        if self.elasticity_enabled:
            self._read_elastic_batch(given)

    def _read_elastic_batch(self, given: dict[str, Any]) -> None:
        """Take the batch of the section `elasticity`; raises `ElasticityConfigError` if the file has another one too."""
        refuse_other_batch(given)
        ranks = self.world_size * given["elasticity"].get("model_parallel_size", 1)
        total, _, micro = compute_elastic_config(given, __version__, world_size=ranks)
        if micro is None:
            raise ElasticityIncompatibleWorldSize(
                f"elasticity.micro_batch_sizes: none divides the samples of a rank, {total // self.world_size}; add one")
        self.train_batch_size, self.train_micro_batch_size_per_gpu = total, micro
        self.gradient_accumulation_steps = total // (micro * self.world_size)

    def _read_training(self, given: dict[str, Any]) -> None:
        optimizer, scheduler = given.get("optimizer") or {}, given.get("scheduler") or {}
        name = optimizer.get("type")
        self.optimizer_name = name.lower() if name and name.lower() in DEEPSPEED_OPTIMIZERS else name
        self.optimizer_params = optimizer.get("params") if name else None
        self.optimizer_legacy_fusion = optimizer.get("legacy_fusion", False)
        self.scheduler_name = scheduler.get("type")
        self.scheduler_params = scheduler.get("params") if self.scheduler_name else None
        self.zero_allow_untested_optimizer = given.get("zero_allow_untested_optimizer", False)
        self.zero_force_ds_cpu_optimizer = given.get("zero_force_ds_cpu_optimizer", True)
        self.gradient_clipping = given.get("gradient_clipping", 1.0)
        self.prescale_gradients = given.get("prescale_gradients", False)
        self.gradient_predivide_factor = given.get("gradient_predivide_factor", 1.0)
        self.gradient_allreduce_op = self._reduction(given.get("gradient_allreduce_op", "mean"))
        self.sparse_gradients_enabled = given.get("sparse_gradients", False)
        self.communication_data_type = self._dtype("communication_data_type", given)
        sequence = self._dtype("seq_parallel_communication_data_type", given)
        self.seq_parallel_communication_data_type = sequence or torch.float32
        self.disable_allgather = given.get("disable_allgather", False)
        self.disable_python_gc = given.get("disable_python_gc", False)
        self.dataloader_drop_last = given.get("dataloader_drop_last", False)
        self.steps_per_print = given.get("steps_per_print")
        self.dump_state = given.get("dump_state", False)
        self.log_level = given.get("log_level")
        self.vocabulary_size = given.get("vocabulary_size")
        self.wall_clock_breakdown = given.get("wall_clock_breakdown", False)
        self.memory_breakdown = given.get("memory_breakdown", False)
        self.use_data_before_expert_parallel_ = given.get("use_data_before_expert_parallelism", False)
        self.graph_harvesting = given.get("graph_harvesting", False)

    def _read_sections(self, given: dict[str, Any]) -> None:
        self.zero_config = get_zero_config(given)
        self.zero_optimization_stage = int(self.zero_config.stage)
        self.zero_enabled = self.zero_optimization_stage > 0
        self.mics_shard_size = self.zero_config.mics_shard_size
        self.float16_config = get_float16_config(given)
        self.bfloat16_config = get_bfloat16_config(given)
        self.activation_checkpointing_config = DeepSpeedActivationCheckpointingConfig(given)
        self.comms_config = DeepSpeedCommsConfig(given)
        self.monitor_config = get_monitor_config(given)
        self.flops_profiler_config = DeepSpeedFlopsProfilerConfig(given)
        self.hybrid_engine = HybridEngineConfig(**given.get("hybrid_engine", {}))
        self.timers_config = get_timers_config(given)
        self.aio_config = get_aio_config(given)
        self.sparse_attention = get_sparse_attention(given)
        self.pld_params = given.get("progressive_layer_drop")
        self.pld_enabled = bool((self.pld_params or {}).get("enabled", False))
        self.pipeline = {"stages": "auto", "partition": "best", "seed_layers": False, "activation_checkpoint_interval": 0,
                         "pipe_partitioned": True, "grad_partitioned": True, **given.get("pipeline", {})}
        types = given.get("data_types", {})
        self.grad_accum_dtype = types.get("grad_accum_dtype")
        self.param_dtype, self.buffer_dtype = types.get("param_dtype"), types.get("buffer_dtype")
        self.keep_in_fp32_modules = types.get("keep_in_fp32_modules", "auto")
        autocast = given.get("torch_autocast", {})
        self.torch_autocast_enabled = autocast.get("enabled", False)
        dtype = autocast.get("dtype")
        self.torch_autocast_dtype = DtypeEnum(dtype).value if self.torch_autocast_enabled and dtype else None
        self.torch_autocast_lower_precision_safe_modules = autocast.get("lower_precision_safe_modules")
        self.data_efficiency_enabled = get_data_efficiency_enabled(given)
        self.data_efficiency_config = get_data_efficiency_config(given)

    def _read_checkpoint(self, section: dict[str, Any]) -> None:
        mode = str(section.get("tag_validation", "WARN")).upper()
        if mode not in TAG_MODES:
            raise DeepSpeedConfigError(f"checkpoint.tag_validation: got {mode}; choose {', '.join(TAG_MODES)}")
        self.checkpoint_config = {"tag_validation": mode,
                                  "checkpoint_serialization": section.get("checkpoint_serialization", True),
                                  "writer": section.get("writer")}
        self.checkpoint_tag_validation_enabled = mode != "IGNORE"
        self.checkpoint_tag_validation_fail = mode == "FAIL"
        self.load_universal_checkpoint = section.get("load_universal", False)
        self.use_node_local_storage = section.get("use_node_local_storage", False)
        parallel = section.get("parallel_write", {}).get("pipeline_stage", False)
        if parallel not in (True, False):
            raise DeepSpeedConfigError(f"checkpoint.parallel_write.pipeline_stage: got {parallel!r}; give true or false")
        self.checkpoint_parallel_write_pipeline = parallel

    def _reduction(self, given: Any) -> str:
        name = str(given).lower()
        if name not in REDUCTIONS:
            raise DeepSpeedConfigError(f"gradient_allreduce_op: got {given!r}; choose {' or '.join(REDUCTIONS)}")
        return name

    def _dtype(self, key: str, given: dict[str, Any]) -> torch.dtype | None:
        name = given.get(key)
        if name is None:
            return None
        if str(name).lower() not in DTYPES:
            raise DeepSpeedConfigError(f"{key}: got {name!r}; choose {', '.join(DTYPES)}")
        return DTYPES[str(name).lower()]

    # The batch: samples of a step = microbatch x accumulation x data ranks

    def _solve_batch(self) -> None:
        total, micro, steps = self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        for key, size in (("train_batch_size", total), ("train_micro_batch_size_per_gpu", micro),
                          ("gradient_accumulation_steps", steps)):
            if isinstance(size, str):
                raise TypeError(f"{key}: got {size!r}; give a whole number"
                                f"{', which the client that wrote the file fills in' if size == 'auto' else ''}")
        assert total is not None or micro is not None, (
            "train_batch_size: missing; give train_batch_size or train_micro_batch_size_per_gpu")
        if steps is None and (micro is None or total is None):
            steps = 1
        if micro is None:
            micro = total // self.world_size // (steps or 1)
        elif total is None:
            total = micro * self.world_size * steps
        elif steps is None:
            steps = total // self.world_size // (micro or 1)
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = total, micro, steps
        for key, size in (("train_batch_size", total), ("train_micro_batch_size_per_gpu", micro),
                          ("gradient_accumulation_steps", steps)):
            assert size > 0, f"{key}: got {size}; it must be 1 or more"
        assert total == micro * steps * self.world_size, (
            f"train_batch_size: got {total}, but microbatches of {micro} x {steps} accumulation steps x {self.world_size} "
            f"data ranks are {micro * steps * self.world_size}; give two of the three")

    def _check(self) -> None:
        assert not (self.float16_config.enabled and self.bfloat16_config.enabled), (
            "fp16.enabled: true beside bf16.enabled; choose one")
        if self.float16_config.fp16_master_weights_and_grads:
            assert self.zero_enabled, "fp16.fp16_master_weights_and_grads: needs a ZeRO stage of 1 to 3"
        if self.bfloat16_config.bf16_master_weights_and_grads:
            assert self.zero_enabled, "bf16.bf16_master_weights_and_grads: needs a ZeRO stage of 1 to 3"
        if not (self.keep_in_fp32_modules == "auto" or isinstance(self.keep_in_fp32_modules, list)):
            raise DeepSpeedConfigError(f"data_types.keep_in_fp32_modules: got {self.keep_in_fp32_modules!r}; give \"auto\" "
                                       f"or a list of patterns")
        if self.vocabulary_size and self.vocabulary_size % 8:
            logger.warning("vocabulary_size: got %s, no multiple of 8, which is slower", self.vocabulary_size)

    def print_user_config(self) -> None:
        """Log the JSON as it was given."""
        logger.info("  json = %s", json.dumps(self._param_dict, sort_keys=True, indent=4, cls=ScientificNotationEncoder,
                                              separators=(",", ":"), default=str))

    def print(self, name: str) -> None:
        """Log every attribute, under the heading `name`."""
        logger.info("%s:", name)
        for key in sorted(vars(self)):
            if key != "_param_dict":
                logger.info("  %s %s", key.ljust(30, "."), vars(self)[key])
        self.print_user_config()


