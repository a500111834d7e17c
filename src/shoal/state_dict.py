"""A plain state dict becomes the values of a sharded model, unit by unit: masters take its precision, weights are rounded.

Names are checked before anything is written, so that a state that does not fit leaves the model as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.tier import held
from shoal.zero.partition import tied_names
from shoal.zero.sharded import ShardedModel
from shoal.zero.unit import Unit

SHOWN = 5
"""Names that an error lists before it counts the rest."""


@torch.no_grad()
def load(model: ShardedModel, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Take over `state` (names as in the module's `state_dict`), which is the same on every rank.

    Raises `UsageError` for tensors of another shape, and if `strict` for names that are missing or unknown.
    """
    wanted, aliases = model.model.state_dict(keep_vars=True), tied_names(model.model)
    problems = [f"{name}: got {tuple(state[name].shape)}, the model has {tuple(tensor.shape)}"
                for name, tensor in wanted.items() if name in state and state[name].shape != tensor.shape]
    if strict:
        tied = {aliases.get(name, name) for name in state}
        problems += [f"{name}: missing" for name in wanted if name not in state and aliases.get(name, name) not in tied]
        problems += [f"{name}: the model has no such tensor" for name in state if name not in wanted]
    if problems:
        rest = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise UsageError(f"load_module_state_dict: {'; '.join(problems[:SHOWN])}{rest}. Nothing was loaded; with "
                         f"strict=False, names on one side only are passed over")
    state = {**{first: state[alias] for alias, first in aliases.items() if alias in state}, **state}
    in_units: set[str] = set()
    for unit in model.units:
        in_units |= {member.name for member in unit.members}
        if any(member.name in state for member in unit.members):
            _load_unit(unit, state)
    for name, tensor in wanted.items():
        if name in state and name not in in_units and name not in aliases:
            tensor.copy_(state[name])


def _load_unit(unit: Unit, state: Mapping[str, Tensor]) -> None:
    unit.gather()
    values = unit.full.float() if unit.full.dtype.itemsize < 4 else unit.full.clone()
    span = unit.master_span
    if unit.state is not None:
        with held(unit.state.master, changed=False) as master:
            values[span.start:span.stop] = master
    for view, member in zip(unit.layout.views(values), unit.members, strict=True):
        if member.name in state:
            view.copy_(state[member.name])
    unit.adopt(values)
