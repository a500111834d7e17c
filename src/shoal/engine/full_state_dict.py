"""Convert between a sharded model and a plain state dict of the whole model, unit by unit.

To consolidate, rank 0 receives the tensors of the ranks of one copy of the model, and joins the slices of tensor ranks. To
load, masters take the state's precision and weights are rounded; names are checked first, so that a state that does not fit
leaves the model unchanged.

Names are those of the module's `state_dict`, whose hooks may rename parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shoal.checkpoint import extra_states, load_extra_states
from shoal.checkpoint.state_dict_export import set_dtype_of_config
from shoal.errors import ReleasedError, UsageError
from shoal.mesh.mesh import MODEL
from shoal.mesh.tensor_slice import TensorSlice, slice_of, whole
from shoal.tier import fetched
from shoal.transport.reduction import promoted_dtype
from shoal.zero.other_memory import replaced_slots
from shoal.zero.partition import tied_names
from shoal.zero.sharded import ShardedModel
from shoal.zero.trainable_unit import TrainableUnit
from shoal.zero.unit import Unit

SHOWN = 5
"""Problems that an error lists before it counts the rest."""


@torch.no_grad()
def consolidate(model: ShardedModel, dtype: torch.dtype | None, *, exclude_frozen: bool) -> dict[str, Any] | None:
    """Gather the whole state dict on rank 0, on the CPU, parameters in `dtype` (None: their own); None on other ranks.

    Where `dtype` has more bits than the weights of a unit, its values are those of the masters. Values are tensors, but for
    the extra state of modules.
    """
    mesh = model.parameter_groups.mesh
    copy = model.parameter_groups.communicator(*MODEL)
    sending = mesh.rank("data") == 0
    dictionary = _state_dict(model.model)  # on every rank: a hook may raise
    now = {parameter: name for name, parameter in model.named().items()}  # pruning and parametrizations rename parameters
    former = {now.get(member.parameter, member.name): member.name for unit in model.units for member in unit.members}
    own: dict[str, Tensor] = {}
    for unit in model.units:
        if exclude_frozen and not isinstance(unit, TrainableUnit):
            continue
        for member, value in zip(unit.members, _values(unit, dtype), strict=True):
            if sending:
                own[now.get(member.parameter, member.name)] = value.to("cpu", dtype or value.dtype, copy=True)
        unit.release()
    if not sending:
        return None
    in_units = former.keys() | set(tied_names(model.model)) | set(model.aliases)
    extra = extra_states(model.model)
    renamed = _renamed(model.model, dictionary)
    in_units |= {key for keys in renamed.values() for key in keys}
    own |= {name: tensor.detach().cpu().clone() for name, tensor in dictionary.items()
            if name not in own and name not in in_units and name not in extra}
    slices = {name: model.tensor_slices.get(former.get(name, name)) for name in own}
    by_rank = copy.gather_objects({name: _TensorPart(cut=slices[name], shape=tuple(tensor.shape), dtype=tensor.dtype)
                                   for name, tensor in own.items()})
    tied = {name: first for names in copy.gather_objects(model.tied_names()) for name, first in names.items()}
    state: dict[str, Any] = {name: value for each in reversed(copy.gather_objects(extra)) for name, value in each.items()}
    for name in dict.fromkeys(name for names in by_rank for name in names):
        held = {rank: names[name] for rank, names in enumerate(by_rank) if name in names}
        first = {0 if part.cut is None else part.cut.rank: rank for rank, part in reversed(held.items())}
        senders = {rank: held[rank] for rank in first.values()}  # of several ranks with the same part, the first
        parts = copy.gather_to_first(own.pop(name, None), {rank: (part.shape, part.dtype) for rank, part in senders.items()})
        if copy.rank == 0:
            cuts = [part.cut for part in senders.values() if part.cut is not None]
            state[name] = whole(parts, cuts) if cuts else parts[0]
    of_ranks = copy.gather_objects(renamed)
    if copy.rank != 0:
        return None
    state |= {name: state[first] for name, first in tied.items() if first in state}
    keys = {name: keys for each in of_ranks for name, keys in each.items()}
    return {key: value for name, value in state.items() for key in keys.get(name, (name,))}


def _state_dict(module: nn.Module) -> dict[str, Any]:
    """Return what the module's `state_dict` has, its parameters themselves."""
    try:
        return module.state_dict(keep_vars=True)
    except ReleasedError as error:
        error.add_note("a hook of the model's state_dict reads a weight, which is not gathered for it; let the hook rename "
                       "or remove entries alone, and change values in the state dict that the engine returns")
        raise


def _renamed(module: nn.Module, dictionary: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the keys that each parameter has in the state dict of `module`, where hooks renamed or removed its own."""
    named = dict(module.named_parameters(remove_duplicate=False))
    missing = {name: parameter for name, parameter in named.items() if name not in dictionary}
    return {name: [key for key, value in dictionary.items() if value is parameter and key not in named]
            for name, parameter in missing.items()}


@runtime_checkable
class _Pretrained(Protocol):
    """A model of Hugging Face, or of PEFT."""

    def save_pretrained(self, save_directory: str | Path, *, state_dict: dict[str, Tensor], **options: Any) -> object:
        """Write the model's weights and configuration as a folder that `from_pretrained` reads."""
        ...


def save_pretrained(module: nn.Module, state: dict[str, Tensor] | None, folder: str | Path, dtype: torch.dtype | None,
                    options: dict[str, Any]) -> str:
    """Call the `save_pretrained` of `module` with the whole `state` in `dtype`, where there is one.

    Return what went wrong, or nothing.
    """
    if not isinstance(module, _Pretrained):
        return (f"the {type(module).__name__} has no save_pretrained of its own, as models of Hugging Face have: call "
                f"save_16bit_model, or save_checkpoint and `shoal checkpoint export`")
    try:
        if state is not None:
            module.save_pretrained(folder, state_dict=state, **options)
            if dtype is not None:
                set_dtype_of_config(Path(folder), dtype)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def remove_frozen(state: dict[str, Tensor], module: nn.Module, prefix: str) -> None:
    """Remove the frozen parameters of `module` from its state dict, whose names begin with `prefix`."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            del state[prefix + name]


def _values(unit: Unit, dtype: torch.dtype | None) -> Sequence[Tensor]:
    """Gather `unit`, and return the whole value of each member: its weight, or its master for a wider `dtype`."""
    unit.gather()  # takes a pending step first
    wider = dtype is not None and promoted_dtype(dtype, unit.full.dtype) != unit.full.dtype
    if wider and isinstance(unit, TrainableUnit) and unit.has_separate_master and not replaced_slots(unit):
        return unit.layout.views(unit.gather_master())
    return [member.parameter.detach() for member in unit.members]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorPart:
    """The part of a tensor that one rank holds."""

    cut: TensorSlice | None
    shape: tuple[int, ...]
    dtype: torch.dtype


@torch.no_grad()
def load(model: ShardedModel, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load `state` (names as in the module's `state_dict`), which is the same on every rank.

    Raises `UsageError` for values that are no tensor or of another shape, and if `strict` for names that are missing or
    unknown.
    """
    extra = extra_states(model.model)
    wanted = _state_dict(model.model)
    renamed = _renamed(model.model, wanted)
    names = {key: name for name, keys in renamed.items() for key in keys}
    state = {names.get(key, key): value for key, value in state.items()}
    wanted = {names.get(key, key): value for key, value in wanted.items()}
    aliases = model.tied_names()
    shapes = {name: model.tensor_slices[name].shape(shape) if name in model.tensor_slices else shape
              for name, shape in ((name, tuple(tensor.shape)) for name, tensor in wanted.items() if name not in extra)}
    problems = [f"{name}: got {_shape(state[name])}, the model has {shape}"
                for name, shape in shapes.items() if name in state and _shape(state[name]) != shape]
    if strict:
        tied = {aliases.get(name, name) for name in state}
        stages = model.parameter_groups.communicator("pipeline")
        known = {name for names in stages.gather_objects(list(wanted)) for name in names}
        problems += [f"{name}: missing" for name in wanted if name not in state and aliases.get(name, name) not in tied]
        problems += [f"{name}: the model has no such tensor" for name in state if name not in known]
    by_stage = model.parameter_groups.communicator("pipeline").gather_objects(problems)
    problems = list(dict.fromkeys(problem for problems in by_stage for problem in problems))
    if problems:
        rest = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise UsageError(f"load_module_state_dict: {'; '.join(problems[:SHOWN])}{rest}. Nothing was loaded; with "
                         f"strict=False, names on one side only are passed over")
    state = {**{first: state[alias] for alias, first in aliases.items() if alias in state}, **state}
    in_units: set[str] = set()
    for unit in model.units:
        in_units |= {member.name for member in unit.members}
        if any(member.name in state for member in unit.members):
            _load_unit(unit, state, model.tensor_slices)
    for name, tensor in wanted.items():
        if name in state and name not in in_units and name not in aliases and name not in extra:
            tensor.copy_(state[name])
    load_extra_states(model.model, state)


def _shape(value: object) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _load_unit(unit: Unit, state: Mapping[str, Tensor], cuts: Mapping[str, TensorSlice]) -> None:
    unit.gather()
    values = unit.full.float() if unit.full.dtype.itemsize < 4 else unit.full.clone()
    if isinstance(unit, TrainableUnit):
        with fetched(unit.state.master, changed=False) as master:
            values[unit.master_range.start:unit.master_range.stop] = master
    for view, member in zip(unit.layout.views(values), unit.members, strict=True):
        if member.name in state:
            cut = cuts.get(member.name)
            view.copy_(state[member.name] if cut is None else slice_of(state[member.name], cut, extent=view.shape[cut.dim]))
    unit.load_full(values)
    unit.versions.mark(slot for slot, member in enumerate(unit.members) if member.name in state)
