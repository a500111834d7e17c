"""A published engine from the arguments that published constructors and `initialize` take.

One call: read the lenient JSON, bring it into Shoal's form (`tolerance.py`), and have Shoal build the engine, of which the
published class allocates the instance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shoal.compat import named_optimizers
from shoal.compat.deepspeed.runtime.config import read_config
from shoal.compat.deepspeed.runtime.lr_schedules import SCHEDULES
from shoal.compat.deepspeed.utils.logging import logger
from shoal.compat.leaf_modules import mark_configured
from shoal.compat.optimizers import optimizer_kind
from shoal.compat.tolerance import tolerate
from shoal.engine.build import EngineClasses, build, loss_scale_of
from shoal.engine.schema import Config
from shoal.errors import ConfigError, UsageError
from shoal.log import warn_once
from shoal.pipeline.module import PipelineModule
from shoal.precision.loss_scale import DynamicScale, LossScale
from shoal.precision.policy import DTYPES
from shoal.zero.partition import has_float_values

__all__ = ["assemble", "tp_model_init"]


def assemble(make: Callable[..., Any], *, args: Any, model: Any, config: Any, config_params: Any = None,
             config_class: Any = None, distributed_port: int = 29500, mesh_param: Any = None,
             **objects: Any) -> dict[str, Any]:
    """Build an engine by `make`, which gets the arguments of Shoal's engine; return the configuration as it was given.

    `config_class` is a `DeepSpeedConfig`, whose JSON is taken where nothing else gives one.
    """
    if model is None:
        raise UsageError("initialize: model is missing; pass the torch module to train")
    if isinstance(model, PipelineModule) and objects.get("mpu") is not None:
        raise UsageError("initialize: got mpu beside a PipelineModule, which brings its own grid; leave mpu out")
    config = config_params if config is None else config
    parsed = getattr(config_class, "_param_dict", None)
    given = read_config(parsed if parsed is not None and config is None else _source(args, config))
    named = _with_model_dtype(named_optimizers.rename(tolerate(given)), model)
    if _tensor_ranks.get(model, 1) > 1:
        named.setdefault("tensor_parallel", {}).setdefault("autotp_size", _tensor_ranks[model])
    mark_configured(model, given)
    classes = EngineClasses(plain=make, pipeline=make,
                            optimizer=partial(optimizer_kind, pipeline=isinstance(model, PipelineModule)),
                            schedules=SCHEDULES, loss_scale=_loss_scale, checks_fp32=_checks_fp32)
    build(classes, args=None, model=model, config=named, config_params=None, distributed_port=distributed_port,
          mesh_param=mesh_param, **objects)
    return given


def _loss_scale(settings: Config) -> LossScale:
    """Return the loss scale; as published, every overflow at stage 0 halves a dynamic one, which stays at its minimum."""
    fp16 = settings.fp16
    if settings.zero_optimization.stage or not (fp16.enabled and fp16.dynamic):
        return loss_scale_of(settings)
    return DynamicScale(initial_scale_power=fp16.initial_scale_power, loss_scale_window=fp16.loss_scale_window, hysteresis=1,
                        min_loss_scale=fp16.min_loss_scale, stays_at_minimum=True)


def _checks_fp32(settings: Config) -> bool:
    """Return whether a step in fp32 is skipped where gradients are not finite: as published, at stages 1 to 3.

    Not where backward steps, which cannot know, nor where the guard judges the step.
    """
    zero = settings.zero_optimization
    return zero.stage > 0 and not zero.offload_optimizer.step_in_backward and not settings.resilience.guard.enabled


def _with_model_dtype(config: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return `config` with the section of a model that is in 16 bits already, which Shoal trains with fp32 masters."""
    dtype = next((parameter.dtype for parameter in model.parameters() if has_float_values(parameter)), None)
    section = next((name for name in ("fp16", "bf16") if DTYPES[name] == dtype), None)
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


_tensor_ranks: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""The tensor ranks that `tp_model_init` asked for, by model."""


def tp_model_init(model: Any, tp_size: int, dtype: Any, config: Any = None, **kwargs: Any) -> Any:
    """Cast `model` and return it; `initialize` slices its layers over `tp_size` tensor ranks by the plan of its class."""
    _tensor_ranks[model] = tp_size
    return model.to(dtype)
