"""The published attributes of sharded parameters, and the published functions that read and write their state.

A parameter that stage 3 or `zero.Init` shards answers `ds_id`, `ds_shape`, `ds_status` and their like; any other has no such
attribute, which is how scripts tell (`hasattr(parameter, "ds_id")`). The answers are properties of `torch.nn.Parameter`,
added when a model is first sharded under the published name: a parameter may belong to a sharded unit or to none at any
time, and the unit alone knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shoal.compat.raising import as_published
from shoal.engine.base import BaseEngine
from shoal.errors import NotSupportedYet, UsageError
from shoal.optim.parameter_state import GRADIENT, MASTER, ParameterState
from shoal.optim.sharded import ShardedOptimizer
from shoal.tier import fetched
from shoal.zero.gathered import gathered
from shoal.zero.grad_attribute import unanswered_grads
from shoal.zero.guard import is_guarded
from shoal.zero.ownership import owner_of
from shoal.zero.placement import STAGES
from shoal.zero.unit import Unit
from shoal.zero.unit_state import Phase

__all__ = ["ZeroParamStatus", "ZeroParamType", "add_attributes", "external", "owned_by", "safe_get_full_fp32_param",
           "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param", "safe_get_local_grad",
           "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad",
           "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad",
           "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized", "sharding_unit"]


class ZeroParamStatus(Enum):
    """Whether a sharded parameter has its values."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """How a parameter rests."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


_STAGE_3 = WeakIdKeyDictionary()
"""The parameters of engines of stage 3, of which small ones may rest whole."""
_numbers = count()
_ids = WeakIdKeyDictionary()
_optimizers = WeakIdKeyDictionary()


def owned_by(optimizer: ShardedOptimizer | None, parameters: Iterable[nn.Parameter], *, stage: int) -> None:
    """Have the functions below find the state of an engine's `parameters` in its `optimizer`."""
    nn.Module._apply = _apply  # pyright: ignore[reportPrivateUsage]  the method behind `to`, `cpu` and the like
    if stage == 3:
        add_attributes()
    for parameter in parameters:
        if stage == 3:
            _STAGE_3[parameter] = True
        if optimizer is not None:
            _optimizers[parameter] = optimizer
        else:  # an engine for inference, after one that trained them
            _optimizers.pop(parameter, None)


# Attributes


def sharding_unit(parameter: nn.Parameter) -> Unit | None:
    """Return the unit of a parameter that stage 3 or `zero.Init` holds, None for any other."""
    unit = owner_of(parameter)
    return unit if isinstance(unit, Unit) and (unit.is_sharded or parameter in _STAGE_3) else None


def _id(parameter: nn.Parameter, unit: Unit) -> int:
    if parameter not in _ids:
        _ids[parameter] = next(_numbers)
    return _ids[parameter]


def _status(parameter: nn.Parameter, unit: Unit) -> ZeroParamStatus:
    """A gather under way for the next forward makes nothing available: scripts gather what is NOT_AVAILABLE, and read."""
    return ZeroParamStatus.AVAILABLE if unit.phase is Phase.GATHERED else ZeroParamStatus.NOT_AVAILABLE


def _slice(parameter: nn.Parameter, unit: Unit) -> Tensor:
    """Return a copy of this rank's slice of the weights, flat."""
    index = next(index for index, member in enumerate(unit.members) if member.parameter is parameter)
    slot, own = unit.layout.slots[index], unit.resting_range
    start, stop = max(slot.start, own.start), min(slot.stop, own.stop)
    if start >= stop:
        return torch.empty(0, dtype=unit.full.dtype, device=unit.full.device)
    with torch.no_grad(), fetched(unit.rest, start - own.start, stop - own.start, changed=False) as values:
        return values.clone()


class GatherHandle:
    """The gather of some units, which `wait` completes."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = list(units)
        for unit in self._units:
            unit.prefetch()

    def wait(self, **unused: Any) -> None:
        """Wait until the parameters have their values."""
        for unit in self._units:
            unit.gather()


def _units(parameters: Iterable[nn.Parameter]) -> list[Unit]:
    """Return the units of sharded parameters, each once, in the order of every rank."""
    units = {unit: None for parameter in parameters if (unit := sharding_unit(parameter)) is not None}
    return sorted(units, key=lambda unit: unit.index)


def _gather(parameter: nn.Parameter, unit: Unit) -> Callable[..., list[GatherHandle] | None]:
    def all_gather(param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False,
                   hierarchy: int = 0) -> list[GatherHandle] | None:
        """Gather this parameter, or those of `param_list`, with all of their units; ranks call it together."""
        handle = GatherHandle(_units([parameter] if param_list is None else param_list))
        if async_op:
            return [handle]
        handle.wait()
        return None

    return all_gather


def _gather_coalesced(parameter: nn.Parameter, unit: Unit) -> Callable[..., GatherHandle]:
    def all_gather_coalesced(params: Iterable[nn.Parameter], safe_mode: bool = False,
                             quantize: bool = False) -> GatherHandle:
        """Begin to gather parameters with all of their units, and return the handle to wait on.

        `safe_mode` has no effect: all checks are made in any case. `quantize` has none either: weights travel unrounded.
        """
        return GatherHandle(_units(params))

    return all_gather_coalesced


def _release(parameter: nn.Parameter, unit: Unit) -> Callable[..., None]:
    def partition(param_list: Iterable[nn.Parameter] | None = None, hierarchy: int = 0,
                  has_been_updated: bool = False) -> None:
        """Release this parameter, or those of `param_list`, with their units.

        With `has_been_updated` each rank keeps what it wrote into its own slices, masters included. Else use
        `GatheredParameters` where writes are to be dropped: here a rank may keep its own.
        """
        for each in _units([parameter] if param_list is None else param_list):
            if has_been_updated and each.phase is Phase.GATHERED:
                each.load_full(each.full)
            each.release()

    return partition


def _convert(parameter: nn.Parameter, unit: Unit) -> Callable[..., None]:
    def convert_to_zero_parameters(param_list: Iterable[nn.Parameter]) -> None:
        """Do nothing for parameters that are sharded; raises `NotSupportedYet` for others."""
        if any(sharding_unit(each) is None for each in param_list):
            raise NotSupportedYet("convert_to_zero_parameters: not supported yet for parameters of no engine; build the "
                                  "module within deepspeed.zero.Init, or give it to deepspeed.initialize")

    return convert_to_zero_parameters


def _reduce(parameter: nn.Parameter, unit: Unit) -> Callable[..., None]:
    def partition_gradients(*unused: Any, **unused_too: Any) -> None:
        """Raise `NotSupportedYet`."""
        raise NotSupportedYet("partition_gradients: gradients are reduced and sliced in backward; read them by "
                              "deepspeed.utils.safe_get_full_grad or safe_get_local_grad")

    return partition_gradients


def _summary(parameter: nn.Parameter, unit: Unit) -> Callable[..., dict[str, Any]]:
    def ds_summary(slf: Any = None, use_debug_name: bool = False) -> dict[str, Any]:
        return {"id": _id(parameter, unit), "status": _status(parameter, unit).name, "numel": parameter.numel(),
                "ds_numel": parameter.numel(), "shape": tuple(parameter.shape), "ds_shape": tuple(parameter.shape),
                "requires_grad": parameter.requires_grad, "grad_shape": None, "persist": not unit.reshards,
                "active_sub_modules": set(), "ds_tensor.shape": _slice(parameter, unit).shape}

    return ds_summary


_ATTRIBUTES: dict[str, Callable[[nn.Parameter, Unit], Any]] = {
    "ds_id": _id,
    "ds_shape": lambda parameter, unit: parameter.shape,
    "ds_numel": lambda parameter, unit: parameter.numel(),
    "ds_tensor": _slice,
    "ds_status": _status,
    "ds_param_type": lambda parameter, unit: ZeroParamType.PARTITIONED,
    "ds_persist": lambda parameter, unit: not unit.reshards,
    "ds_active_sub_modules": lambda parameter, unit: set[int](),
    "ds_process_group": lambda parameter, unit: unit.communicator.group,
    "ds_secondary_tensor": lambda parameter, unit: None,
    "is_external_param": lambda parameter, unit: False,
    "nvme_swapper": lambda parameter, unit: None,
    "all_gather": _gather,
    "all_gather_coalesced": _gather_coalesced,
    "partition": _release,
    "convert_to_zero_parameters": _convert,
    "partition_gradients": _reduce,
    "reduce_gradients_at_owner": _reduce,
    "ds_summary": _summary,
    "partition_numel": lambda parameter, unit: lambda: _slice(parameter, unit).numel(),
    "aligned_size": lambda parameter, unit: lambda: parameter.numel(),
    "padding_size": lambda parameter, unit: lambda: 0,
}
"""The published attributes of a sharded parameter."""


external: WeakKeyDictionary[nn.Module, dict[int, nn.Parameter]] = WeakKeyDictionary()
"""The parameters of other modules that a module was registered to use, by identity."""


def _external_parameters(module: nn.Module) -> Iterator[tuple[int, nn.Parameter]]:
    """Yield each registered parameter of another module, with its `ds_id`."""
    for parameter in external.get(module, {}).values():
        yield parameter.ds_id, parameter  # pyright: ignore[reportAttributeAccessIssue]  the published name


def _all_parameters(module: nn.Module) -> Iterator[tuple[str | int, nn.Parameter]]:
    """Yield the module's own parameters by name, and the registered ones by `ds_id`."""
    yield from module.named_parameters(recurse=False)
    yield from _external_parameters(module)


def _zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    """Discard the gradients of a module; those of a model of stage 3 as `engine.zero_grad` does, for they are slices."""
    optimizers = {optimizer: None for parameter in self.parameters() if sharding_unit(parameter) is not None
                  and (optimizer := _optimizers.get(parameter)) is not None}
    own = {*self.parameters()}
    for optimizer in optimizers:
        if own.issuperset(parameter for group in optimizer.bit16_groups for parameter in group):
            optimizer.zero_grad()
            own.difference_update(parameter for parameter in own.copy() if _optimizers.get(parameter) is optimizer)
    if own:
        _plain_zero_grad(self, set_to_none)


_plain_zero_grad = nn.Module.zero_grad


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Move a module to another device (`cpu`, `to`); its released parameters have no values to move, and stay as they are.

    Any other change of theirs is one of `Module._apply`: those that a read cannot gather raise `ReleasedError`. The engine
    keeps gradients on its device: a move reads none of a pass that no step has ended.
    """
    own = self._parameters  # pyright: ignore[reportPrivateUsage]  where Module._apply finds what it converts
    released = {name: parameter for name, parameter in own.items() if parameter is not None and _stays(fn, parameter)}
    if released:  # the members of a scripted module are no dict
        own.update(dict.fromkeys(released))
    try:
        with unanswered_grads():
            return _plain_apply(self, fn, recurse)
    finally:
        if released:
            own.update(released)


def _stays(fn: Callable[[Tensor], Tensor], parameter: nn.Parameter) -> bool:
    """Whether `fn` moves a parameter, without a change of its values or dtype, and a read of the parameter would raise."""
    if not is_guarded(parameter) or ((owner := owner_of(parameter)) is not None and owner.serves_reads):
        return False
    probe = torch.tensor([3, 5], dtype=parameter.dtype, device=parameter.device)
    try:
        moved = fn(probe)
        return (moved is not probe and moved.device.type != "meta" and moved.dtype == probe.dtype
                and torch.equal(moved.to(probe.device), probe))
    except (RuntimeError, TypeError, ValueError, IndexError):  # made for another shape, or a dtype that is not compared
        return False


_plain_apply = nn.Module._apply  # pyright: ignore[reportPrivateUsage]  what the published name changes


def _load_from_state_dict(self: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any],
                          *results: Any, **named: Any) -> None:
    """Load the parameters of one module; released ones are gathered for it, and what rank 0 loads counts.

    Every rank calls it with the same keys.
    """
    own = self._parameters  # pyright: ignore[reportPrivateUsage]  where Module._load_from_state_dict finds what it loads
    hooks = self._load_state_dict_pre_hooks  # pyright: ignore[reportPrivateUsage]  they may rename keys
    released = [parameter for name, parameter in own.items()
                if parameter is not None and (hooks or prefix + name in state_dict) and is_guarded(parameter)
                and (owner := owner_of(parameter)) is not None and not owner.serves_reads]
    with gathered(released, modifier_rank=0, enabled=not local_metadata.get("assign_to_params_buffers")):
        _plain_load(self, state_dict, prefix, local_metadata, *results, **named)


_plain_load = nn.Module._load_from_state_dict  # pyright: ignore[reportPrivateUsage]  what the published name changes


def add_attributes() -> None:
    """Add the published attributes to `torch.nn.Parameter`, and the published methods to `torch.nn.Module`."""
    nn.Module.zero_grad = _zero_grad
    nn.Module._apply = _apply  # pyright: ignore[reportPrivateUsage]  the method behind `to`, `cpu` and the like
    nn.Module._load_from_state_dict = _load_from_state_dict  # pyright: ignore[reportPrivateUsage]  behind `load_state_dict`
    for name, method in (("ds_external_parameters", _external_parameters), ("all_parameters", _all_parameters)):
        if name not in vars(nn.Module):
            setattr(nn.Module, name, method)
    for name, answer in _ATTRIBUTES.items():
        if name not in vars(nn.Parameter):
            setattr(nn.Parameter, name, property(_answering(name, answer)))
    if "ds_status" not in vars(Tensor):
        Tensor.ds_status = property(_status_of_view)  # pyright: ignore[reportAttributeAccessIssue]  the published name


def _status_of_view(tensor: Tensor) -> ZeroParamStatus:
    """AVAILABLE for a view of gathered weights: what a custom autograd function saved of a parameter is no parameter."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        storage = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        units = {unit for parameter in _STAGE_3 if isinstance(unit := owner_of(parameter), Unit)}
        if storage and any(unit.full.untyped_storage().data_ptr() == storage for unit in units):
            return ZeroParamStatus.AVAILABLE
    raise AttributeError(f"'{type(tensor).__name__}' object has no attribute 'ds_status'")


def _answering(name: str, answer: Callable[[nn.Parameter, Unit], Any]) -> Callable[[nn.Parameter], Any]:
    def get(self: nn.Parameter) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]  metadata of a released parameter
            unit = sharding_unit(self)
            if unit is None:
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            return answer(self, unit)

    get.__doc__ = f"The published `{name}` of a sharded parameter."
    return get


# State


def _state(parameter: nn.Parameter) -> ParameterState | None:
    """Return the state of a parameter that an engine of this process trains, whichever call has built it."""
    for reference in list(BaseEngine.engines.values()):
        engine = reference()
        if engine is not None and engine.optimizer is not None:
            state = ParameterState.of(engine.optimizer, parameter)
            if state is not None:
                return state
    return None


def _local(parameter: nn.Parameter) -> ParameterState | None:
    if sharding_unit(parameter) is None:
        raise UsageError(f"a slice of a parameter {tuple(parameter.shape)} that is not sharded; at stages 0 to 2 use the "
                         f"functions named safe_get_full_ and safe_set_full_")
    return _state(parameter)


def _known(state: ParameterState, kind: str) -> str:
    """Return the name of a moment; raises if the optimizer keeps none of this name."""
    if kind not in state.kinds():
        raise UsageError(f"{state.slot.name}: the {type(state.optimizer.optimizer).__name__} keeps no '{kind}'; it keeps "
                         f"{', '.join(state.kinds()) or 'nothing'}")
    return kind


@as_published
def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole fp32 value of a parameter; None if no engine trains it. Ranks call it together."""
    state = _state(param)
    if state is not None:
        return state.full(MASTER)
    if owner_of(param) is None:
        return None
    with gathered(param):
        return param.detach().float().clone()


@as_published
def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole reduced gradient in fp32, without the loss scale; None between a step and the next backward.

    Raises `ValueError` in place of None at stages 1 and 2, as published.
    """
    state = _state(param)
    if state is None:
        return None if is_guarded(param) else param.grad
    gradient = state.full(GRADIENT)
    if gradient is None and param not in _STAGE_3 and state.unit.stage in (STAGES[1], STAGES[2]):
        raise UsageError(f"{state.slot.name}: there is no gradient now; read it after backward and before step, at stage 1 "
                         f"after the last backward of an accumulation, which reduces it")
    return gradient


@as_published
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return the whole moment of this name, None if the optimizer keeps none."""
    state = _state(param)
    return None if state is None else state.full(_known(state, optim_state_key))


@as_published
def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole fp32 value of a parameter; its weights follow at once."""
    if (state := _state(param)) is not None:
        state.write_full(MASTER, value)


@as_published
def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole reduced gradient, which the next step takes."""
    if (state := _state(param)) is not None:
        state.write_full(GRADIENT, value)


@as_published
def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write the whole moment of this name."""
    if (state := _state(param)) is not None:
        state.write_full(_known(state, optim_state_key), value)


@as_published
def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's slice of the fp32 value, at stage 3."""
    state = _local(param)
    return None if state is None else state.local(MASTER)


@as_published
def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's slice of the reduced gradient, at stage 3."""
    state = _local(param)
    return None if state is None else state.local(GRADIENT)


@as_published
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's slice of the moment of this name, at stage 3."""
    state = _local(param)
    return None if state is None else state.local(_known(state, optim_state_key))


@as_published
def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's slice of the fp32 value, at stage 3."""
    if (state := _local(param)) is not None:
        state.write_local(MASTER, value)


@as_published
def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's slice of the reduced gradient, at stage 3."""
    if (state := _local(param)) is not None:
        state.write_local(GRADIENT, value)


@as_published
def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write this rank's slice of the moment of this name, at stage 3."""
    if (state := _local(param)) is not None:
        state.write_local(_known(state, optim_state_key), value)


@as_published
def safe_update_full_grad_vectorized(param_list: Iterable[nn.Parameter],
                                     update_func: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
    """Replace each parameter's reduced gradient by `update_func(gradient, parameter)`."""
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))
