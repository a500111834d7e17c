"""Give a model its parameters back, also if a failure has lost some: a rank or a disk that held them is gone.

    initialize failed    lost parameters stay guarded, so that reading one raises
    destroy              lost parameters read as NaN, so that the model can be filled or handed to another engine
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from shoal.log import logger
from shoal.zero.guard import guard, unguard
from shoal.zero.ownership import clear_owner, set_owner
from shoal.zero.sharded import ShardedModel
from shoal.zero.unit import Unit
from shoal.zero.unit_state import Phase

__all__ = ["fill_nan", "give_back", "missing_units", "unit_names"]


class _LostOwner:
    """The owner of a lost parameter, which fills it with NaN at its first use."""

    serves_reads = True
    grads = None

    def read(self, parameter: nn.Parameter, operation: str, operands: Sequence[torch.Tensor] = ()) -> None:
        """Give `parameter` memory of its own, full of NaN, which may be read and written from here on."""
        unguard(parameter)
        clear_owner(parameter)
        parameter.data = parameter.new_full(parameter.shape, torch.nan)

    def copy(self, parameter: nn.Parameter) -> None:
        """Return None: a copy is full of NaN, and a plain parameter."""

    def copy_at_rest(self, parameter: nn.Parameter, source: nn.Parameter) -> bool:
        """Return False: there is nothing at rest."""
        return False

    def close(self) -> None:
        """Do nothing: there is no storage to release."""


_LOST = _LostOwner()


def missing_units(model: ShardedModel) -> list[Unit]:
    """Return the units of a destroyed `model` whose weights could not be gathered: the ranks or the disk that held them are
    gone. Their parameters stay guarded, so that reading them raises.
    """
    return [unit for unit in model.units if unit.phase is not Phase.GATHERED]


def unit_names(units: Iterable[Unit]) -> str:
    """Return the names of `units` for an error message."""
    return "units " + ", ".join(f"'{unit.name}'" for unit in units)


def give_back(model: ShardedModel, rank: int) -> None:
    """Give the module of `model` its parameters back. If some are lost, log their units, fill them with NaN, and raise."""
    try:
        model.destroy()
    except Exception as error:
        if units := missing_units(model):
            logger.error("rank %d: destroy: the parameters of %s are lost, and read as NaN from here on. (%s)", rank,
                         unit_names(units), error)
            fill_nan(units)
        raise


def fill_nan(units: Iterable[Unit]) -> None:
    """Let the parameters of `units`, which are never integers, read as NaN, for the caller or another engine to fill.

    They take no memory before their first use.
    """
    for parameter in (member.parameter for unit in units for member in unit.members):
        unguard(parameter)
        parameter.data = parameter.new_empty(()).expand(parameter.shape)
        guard(parameter)
        set_owner(parameter, _LOST)
