"""`initialize` as published: Shoal's engine, configured with the published tolerance.

One call: read the lenient JSON, bring it into Shoal's form (`tolerance.py`), build the engine under its published class, and
give it the configuration that its published accessors answer from.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.compat import named_optimizers
from shoal.compat.deepspeed.runtime.config import read_config
from shoal.compat.deepspeed.utils.logging import logger
from shoal.compat.engine import DeepSpeedEngine, PipelineEngine
from shoal.compat.leaf_modules import mark_configured
from shoal.compat.optimizers import PlainOptimizer, optimizer_kind
from shoal.compat.raising import as_published
from shoal.compat.tolerance import tolerate
from shoal.compat.unsupported import unsupported_function
from shoal.engine.build import EngineClasses, build
from shoal.errors import ConfigError, UsageError
from shoal.log import warn_once

__all__ = ["add_config_arguments", "default_inference_config", "init_inference", "initialize", "tp_model_init"]

CLASSES = EngineClasses(plain=DeepSpeedEngine, pipeline=PipelineEngine, optimizer=optimizer_kind)


@as_published
def initialize(args: Any = None, model: Any = None, optimizer: Any = None, model_parameters: Any = None,
               training_data: Any = None, lr_scheduler: Any = None, distributed_port: int = 29500, mpu: Any = None,
               dist_init_required: bool | None = None, collate_fn: Any = None, config: Any = None, mesh_param: Any = None,
               config_params: Any = None) -> tuple[Any, Any, Any, Any]:
    """Wrap `model` for training; returns the engine, its optimizer, the loader and the schedule, None where absent.

    In fp32 at stage 0 the optimizer is the torch optimizer itself, as published. Raises Shoal's errors, which are also of
    the published types.
    """
    if model is None:
        raise UsageError("initialize: model is missing; pass the torch module to train")
    given = read_config(_source(args, config if config is not None else config_params))
    named = _with_model_dtype(named_optimizers.rename(tolerate(given)), model)
    if _tensor_ranks.get(model, 1) > 1:
        named.setdefault("tensor_parallel", {}).setdefault("autotp_size", _tensor_ranks[model])
    mark_configured(model, given)
    engine: Any = build(CLASSES, args=None, model=model, optimizer=optimizer, model_parameters=model_parameters,
                        training_data=training_data, lr_scheduler=lr_scheduler, distributed_port=distributed_port, mpu=mpu,
                        dist_init_required=dist_init_required, collate_fn=collate_fn, config=named, mesh_param=mesh_param,
                        config_params=None)
    engine.configure(given)
    stepped = engine.optimizer
    if type(stepped) is PlainOptimizer:
        stepped = optimizer if isinstance(optimizer, Optimizer) else stepped.optimizer
    return engine, stepped, engine.training_dataloader, engine.lr_scheduler


def _with_model_dtype(config: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return `config` with the section of a model that is in 16 bits already, which Shoal trains with fp32 masters."""
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)
    section = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype) if dtype is not None else None
    if section is None or any((config.get(name) or {}).get("enabled") is True for name in ("fp16", "bf16", "bfloat16")):
        return config
    warn_once(f"{section}.enabled: is not set, and the model is in {section} already: it is trained in {section} with fp32 "
              f"masters; set {section}.enabled to true to hide this warning")
    return config | {section: {"enabled": True, **({"loss_scale": 1.0} if section == "fp16" else {})}}


def _source(args: Any, config: Any) -> Any:
    """Return the one configuration that was given."""
    given: dict[str, Any] = {} if args is None else vars(args)
    if given.get("deepscale_config") is not None:
        logger.warning("--deepscale_config is the oldest spelling; write --deepspeed_config")
    named = next((given[key] for key in ("deepspeed_config", "deepscale_config", "shoal_config")
                  if given.get(key) is not None), None)
    if named is not None and config is not None:
        raise ConfigError("initialize: got args.deepspeed_config and config; give one of them")
    if named is None and config is None:
        raise ConfigError("initialize: got no configuration; give config=PATH_OR_DICT, or --deepspeed_config through args")
    return named if config is None else config


def add_config_arguments(parser: Any) -> Any:
    """Add `--deepspeed` and `--deepspeed_config` to an argparse parser, and return it."""
    group = parser.add_argument_group("DeepSpeed", "distributed training")
    group.add_argument("--deepspeed", action="store_true", default=False, help="accepted; the launcher starts the ranks")
    group.add_argument("--deepspeed_config", type=str, default=None, help="the JSON configuration")
    group.add_argument("--deepscale", action="store_true", default=False, help="the oldest spelling of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, help="the oldest spelling of --deepspeed_config")
    return parser


init_inference = unsupported_function("init_inference", "generate with the module of a training engine, or with vLLM")
default_inference_config = unsupported_function("default_inference_config", "there is no inference engine")

_tensor_ranks: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""The tensor ranks that `tp_model_init` asked for, by model."""


def tp_model_init(model: Any, tp_size: int, dtype: Any, config: Any = None, **kwargs: Any) -> Any:
    """Cast `model` and return it; `initialize` slices its layers over `tp_size` tensor ranks by the plan of its class."""
    _tensor_ranks[model] = tp_size
    return model.to(dtype)
