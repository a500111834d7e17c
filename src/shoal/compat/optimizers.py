"""Shoal's sharded optimizer under the names that published engines give theirs.

There is one mechanism, so these classes differ in name: scripts tell by `isinstance` which stage and precision they train
with. What they add is the published vocabulary (`cur_scale`, `loss_scaler`, `set_lr`, `bit16_groups`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from shoal.engine.schema import Config
from shoal.optim.compressed import CompressedOptimizer
from shoal.optim.elementwise import arithmetic_class
from shoal.optim.engine_optimizer import hooks_of
from shoal.optim.handed_over import hand_over
from shoal.optim.masks import MASK
from shoal.optim.parameter_state import ReplicatedState
from shoal.optim.sharded import ShardedOptimizer
from shoal.precision.loss_scale import DynamicScale, StaticScale
from shoal.zero.ownership import owner_of
from shoal.zero.unit import Unit

__all__ = ["BF16_Optimizer", "DeepSpeedOptimizer", "DeepSpeedZeRoOffload", "DeepSpeedZeroOptimizer",
           "DeepSpeedZeroOptimizer_Stage3", "FP16_Optimizer", "FP16_UnfusedOptimizer", "PlainOptimizer",
           "PublishedOptimizer", "ZeROOptimizer", "optimizer_kind"]


class DeepSpeedOptimizer:
    """The base of published optimizers in engines."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """The base of those that shard."""


class LossScaleView:
    """The loss scale of an optimizer under its published attributes, as it is at each read."""

    scale_factor = 2.0
    raise_error_at_min_scale = True

    def __init__(self, optimizer: ShardedOptimizer):
        self._optimizer = optimizer

    @property
    def _scale(self) -> DynamicScale | None:
        scaler = self._optimizer.scaler
        return scaler if isinstance(scaler, DynamicScale) else None

    @property
    def _state(self) -> dict[str, Any]:
        return {"patience": 1, "clean": 0, "steps": 0, **self._optimizer.scaler.state_dict()}

    @property
    def dynamic(self) -> bool:
        """Whether the scale adapts."""
        return self._scale is not None

    dynamic_loss_scale = dynamic

    @property
    def cur_scale(self) -> float:
        """The factor of the next loss."""
        return self._optimizer.scaler.value

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        """Steps so far, skipped ones included."""
        return int(self._state["steps"])

    @property
    def last_overflow_iter(self) -> int:
        """The step that overflowed last, -1 if none did."""
        return self.cur_iter - int(self._state["clean"]) - 1

    @property
    def cur_hysteresis(self) -> int:
        """Overflows until the scale halves."""
        return int(self._state["patience"])

    @property
    def delayed_shift(self) -> int:
        """Overflows until the scale halves, when none has happened."""
        return 1 if self._scale is None else self._scale.hysteresis

    @property
    def consecutive_hysteresis(self) -> bool:
        """Whether a clean step resets the count of overflows."""
        return self._scale is not None and self._scale.consecutive

    @property
    def scale_window(self) -> int:
        """Clean steps until the scale doubles."""
        return 1 if self._scale is None else self._scale.window

    @property
    def min_scale(self) -> float:
        """The smallest scale."""
        return self.cur_scale if self._scale is None else self._scale.smallest

    min_loss_scale = min_scale


class PublishedOptimizer(ShardedOptimizer):
    """The optimizer of one engine, with the published members."""

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run `engine.backward(loss)`, which scales the loss and divides it by the accumulation."""
        self._engine("backward").backward_by_optimizer(loss, retain_graph=retain_graph)

    @property
    def loss_scaler(self) -> LossScaleView:
        """The loss scale under its published attributes."""
        return LossScaleView(self)

    loss_scale_config = loss_scaler

    @property
    def loss_scale(self) -> float:
        return self.scaler.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.override_loss_scale(value)

    @property
    def cur_scale(self) -> float:
        """The factor of the next loss."""
        return self.scaler.value

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return isinstance(self.scaler, DynamicScale)

    @property
    def custom_loss_scaler(self) -> bool:
        """Whether `override_loss_scale` was called."""
        return isinstance(self.scaler, OverriddenScale)

    @property
    def external_loss_scale(self) -> float | None:
        """The loss scale that `override_loss_scale` set."""
        return self.scaler.value if isinstance(self.scaler, OverriddenScale) else None

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use this loss scale from the next loss on, and keep it."""
        self.scaler = OverriddenScale(float(loss_scale))

    @property
    def clip_grad(self) -> float:
        """The largest global norm of the gradients; 0 disables clipping."""
        return self.rules.clipping

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The model's trained parameters, by optimizer group."""
        groups: list[dict[nn.Parameter, None]] = [{} for _ in self.param_groups]
        for unit in self._model.trainable:
            for member in unit.members:
                groups[member.group][member.parameter] = None
        return [list(group) for group in groups]

    fp16_groups = bf16_groups = bit16_groups

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype of the weights."""
        return next((group[0].dtype for group in self.bit16_groups if group), torch.float32)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Return the learning rate of the first group."""
        return self.param_groups[0]["lr"]

    def refresh_fp32_params(self) -> None:
        """Do nothing: masters follow weights that are written within a gather with a `modifier_rank`."""

    def destroy(self) -> None:
        """Do nothing: `engine.destroy` detaches the optimizer as well."""


class OverriddenScale(StaticScale):
    """A loss scale that a script set."""


class DeepSpeedZeroOptimizer(PublishedOptimizer, ZeROOptimizer):
    """The optimizer of stages 1 and 2."""


class DeepSpeedZeRoOffload:
    """The object through which published scripts find the hooks that gather the parameters of a module at stage 3.

    Scripts remove the hooks of its lists while they generate. The lists are empty: Shoal's hooks gather for inference too,
    and need not be removed.
    """

    def __init__(self, module: nn.Module, timers: Any = None, ds_config: Any = None, **unused: Any) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Do nothing: no hook was removed."""

    _register_hooks_recursively = setup_zero_stage3_hooks = _register_deepspeed_module

    def partition_all_parameters(self) -> None:
        """Release every parameter that is gathered, and in no use."""
        for parameter in self.module.parameters():
            if isinstance(unit := owner_of(parameter), Unit):
                unit.release()

    empty_partition_cache = partition_all_parameters

    def destroy(self) -> None:
        """Do nothing: `engine.destroy` detaches the module."""


class DeepSpeedZeroOptimizer_Stage3(PublishedOptimizer, ZeROOptimizer):
    """The optimizer of stage 3."""

    @property
    def parameter_offload(self) -> DeepSpeedZeRoOffload:
        """The object through which published scripts find the hooks that gather parameters."""
        return DeepSpeedZeRoOffload(self._model.model)


class BF16_Optimizer(PublishedOptimizer, ZeROOptimizer):
    """The optimizer of bf16 with gradients accumulated in fp32, at stage 1."""


class FP16_Optimizer(PublishedOptimizer, DeepSpeedOptimizer):
    """The optimizer of 16-bit training at stage 0, of the Adam family."""


class FP16_UnfusedOptimizer(PublishedOptimizer, DeepSpeedOptimizer):
    """The optimizer of 16-bit training at stage 0, of the other families."""


class PlainOptimizer(PublishedOptimizer):
    """The optimizer of fp32 training at stage 0, which published scripts take for the inner optimizer.

    `isinstance` finds the class of the inner optimizer, and attributes that this one lacks are the inner one's. State is
    read by the model's parameters, and saved by their numbers, as torch's optimizers do.
    """

    @ShardedOptimizer.state.getter
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """The state of each of the model's parameters, as it rests; empty before the first step."""
        return ReplicatedState(self)

    def _build_state_dict(self) -> dict[str, Any]:
        """Return the state by the numbers of the parameters, on every rank."""
        numbers = {parameter: number for number, parameter in enumerate(
            parameter for group in self.param_groups for parameter in group["params"])}
        groups = [{**{key: value for key, value in group.items() if key != MASK},
                   "params": [numbers[parameter] for parameter in group["params"]]} for group in self.param_groups]
        return {"state": {numbers[parameter]: {**state} for parameter, state in self.state.items()}, "param_groups": groups}

    def as_inner(self) -> Optimizer:
        """Return an optimizer of the inner one's class over the model's parameters, whose calls reach the engine."""
        inner = self.optimizer
        given = object.__new__(type(inner))
        vars(given).update({**vars(inner), **hooks_of(self)})
        hand_over(given, self)
        return given

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  as proxies do, without a setter
        inner = vars(self).get("optimizer")
        return PlainOptimizer if inner is None else type(inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optimizer" not in vars(self):
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def optimizer_kind(settings: Config, inner: Optimizer, *, pipeline: bool = False) -> type[ShardedOptimizer]:
    """Return the published class for a configuration, of a pipeline or of another model."""
    zero = settings.zero_optimization
    accumulates_wide = settings.bf16.enabled and settings.data_types.grad_accum_dtype == "fp32"
    match zero.stage:
        case 3:
            return DeepSpeedZeroOptimizer_Stage3
        case 1 if accumulates_wide and zero.offload_optimizer.device == "none":
            return BF16_Optimizer
        case 1 | 2:
            return DeepSpeedZeroOptimizer
        case _ if not (settings.fp16.enabled or settings.bf16.enabled):
            return PlainOptimizer
        case _ if pipeline and settings.bf16.enabled:
            return BF16_Optimizer
        case _:
            fused = issubclass(arithmetic_class(type(inner)), Adam) or isinstance(inner, CompressedOptimizer)
            return FP16_Optimizer if fused else FP16_UnfusedOptimizer
