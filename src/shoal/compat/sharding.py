"""`zero.Init` and `zero.GatheredParameters` as published, over Shoal's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.compat.deepspeed.runtime.config import read_config
from shoal.compat.parameters import add_attributes, external
from shoal.compat.raising import published_errors
from shoal.compat.tolerance import tolerate
from shoal.errors import NotSupportedYet, UsageError
from shoal.precision.policy import DTYPES
from shoal.zero.gathered import gathered
from shoal.zero.init import Init as NativeInit

__all__ = ["DeepSpeedTensorOverride", "GatheredParameters", "Init", "register_external_parameter",
           "unregister_external_parameter"]


class DeepSpeedTensorOverride(Enum):
    """The properties of new tensors that `Init` decides."""

    dtype = 1
    device = 2


OVERRIDES = [DeepSpeedTensorOverride.dtype, DeepSpeedTensorOverride.device]


class Init(NativeInit):
    """Context in which modules are built sharded; with `module=`, shard one that exists, at once.

    The dtype is `dtype`, or the one that the configuration trains in. Keywords that ask for what Shoal does in any case
    (`mem_efficient_linear`, `pin_memory`, `param_swapper`) have no effect.
    """

    def __init__(self, module: nn.Module | None = None, data_parallel_group: dist.ProcessGroup | None = None,
                 mem_efficient_linear: bool = True, remote_device: str | None = None, pin_memory: bool = False,
                 config_dict_or_path: Any = None, config: Any = None, enabled: bool = True,
                 dtype: torch.dtype | None = None, mpu: Any = None, zero_param_parallel_group: Any = None,
                 zero_quantized_weights: bool = False, zero_quantized_nontrainable_weights: bool = False,
                 sequence_data_parallel_group: dist.ProcessGroup | None = None, param_swapper: Any = None,
                 tensor_overrides: list[DeepSpeedTensorOverride] = OVERRIDES):
        with published_errors():
            if zero_quantized_weights or zero_quantized_nontrainable_weights or zero_param_parallel_group is not None:
                raise NotSupportedYet("zero.Init: quantized and secondary shards (ZeRO++) are not supported yet; leave "
                                      "zero_quantized_weights and zero_param_parallel_group out")
            source = config_dict_or_path if config_dict_or_path is not None else config
            given = {} if source is None else read_config(source)
            native = tolerate(given)
            if dtype is None:
                dtype = next((DTYPES[key] for key in ("fp16", "bf16") if (native.get(key) or {}).get("enabled") is True),
                             None)
            group = data_parallel_group if data_parallel_group is not None else sequence_data_parallel_group
            if group is None and mpu is not None:
                group = mpu.get_data_parallel_group()
            if enabled:
                add_attributes()
            super().__init__(module, group, mem_efficient_linear, None if remote_device == "none" else remote_device,
                             pin_memory, config=native, enabled=enabled, dtype=dtype)


class GatheredParameters:
    """Context in which `params` (one, or an iterable) are whole.

    With `modifier_rank` None, writes are dropped, with a warning; with a rank, that rank's writes are taken over
    everywhere. Parameters that nothing shards are left alone.
    """

    def __init__(self, params: nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None,
                 fwd_module: nn.Module | None = None, enabled: bool = True):
        self.params = [params] if isinstance(params, nn.Parameter) else list(params)
        self.src_rank = modifier_rank
        self.enabled = enabled
        self._context: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        with published_errors():
            self._context = gathered(self.params, self.src_rank, enabled=self.enabled)
            self._context.__enter__()

    def __exit__(self, *failure: Any) -> None:
        context, self._context = self._context, None
        if context is not None:
            with published_errors():
                context.__exit__(*failure)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Note that `module` uses a parameter of another module. Shoal gathers such a parameter when it is read.

    Raises `RuntimeError` for anything else than a parameter.
    """
    if not isinstance(parameter, nn.Parameter):  # pyright: ignore[reportUnnecessaryIsInstance]  scripts pass tensors
        raise UsageError(f"register_external_parameter: got a {type(parameter).__name__}; pass a torch.nn.Parameter")
    external.setdefault(module, {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Forget a registered parameter; raises `RuntimeError` if it was not registered."""
    if not isinstance(parameter, nn.Parameter):  # pyright: ignore[reportUnnecessaryIsInstance]  scripts pass tensors
        raise UsageError(f"unregister_external_parameter: got a {type(parameter).__name__}; pass a torch.nn.Parameter")
    if external.get(module, {}).pop(id(parameter), None) is None:
        raise UsageError("unregister_external_parameter: this parameter is not registered with this module; call "
                         "register_external_parameter first")


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype,
                                           target_device: Any = None) -> Callable[..., torch.Tensor]:
    """Return `fn` with its floating-point results in `target_fp_dtype`."""
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if made.is_floating_point() else made

    return wrapped
