"""What a model cannot be given back of: the ranks or the disk that held its weights are gone.

Such parameters stay guarded, so that reading them raises. `lose` goes further, for a model that is to be filled again, by
another engine or by hand: they are not a number then, each of them from its first use on, and take no memory before it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shoal.zero.guard import clear_owner, guard, set_owner, unguard
from shoal.zero.sharded import ShardedModel
from shoal.zero.unit import Phase, Unit

__all__ = ["fill_nan", "missing", "named"]


class _Nobody:
    """The owner of a parameter that is lost."""

    def read(self, parameter: nn.Parameter, operation: str) -> None:
        """Give `parameter` memory of its own, not a number, which it may read and write from here on."""
        unguard(parameter)
        clear_owner(parameter)
        parameter.data = parameter.new_full(parameter.shape, torch.nan)

    def close(self) -> None:
        """Nothing rests anywhere."""


_NOBODY = _Nobody()


def missing(model: ShardedModel) -> list[Unit]:
    """Return the units of a destroyed `model` whose parameters could not be had."""
    return [unit for unit in model.units if unit.phase is not Phase.GATHERED]


def named(units: Iterable[Unit]) -> str:
    """Name `units` in an error."""
    return "units " + ", ".join(f"'{unit.name}'" for unit in units)


def fill_nan(units: Iterable[Unit]) -> None:
    """Let the parameters of `units`, which are never integers, be not a number, for others to fill."""
    for parameter in (member.parameter for unit in units for member in unit.members):
        unguard(parameter)
        parameter.data = parameter.new_empty(()).expand(parameter.shape)
        guard(parameter)
        set_owner(parameter, _NOBODY)
