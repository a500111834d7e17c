"""Whole parameters for a while: gathered on entry, released on exit, with or without what was written meanwhile."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from torch import nn

from shoal.zero.guard import owner_of
from shoal.zero.placement import REPLICATE
from shoal.zero.unit import Unit

Gatherable = nn.Parameter | nn.Module | Iterable[nn.Parameter]


@contextmanager
def gathered(parameters: Gatherable, modifier_rank: int | None = None, fwd_module: nn.Module | None = None,
             enabled: bool = True) -> Generator[None]:
    """Hold `parameters` (one, a module's, or an iterable) whole within the context.

    With `modifier_rank` None, what is written into sharded ones is dropped; with a rank, what that rank wrote is taken
    over everywhere, masters included. Every rank of the data axis enters with the same parameters. Works at every stage,
    nests, and ignores parameters that no engine and no `zero.Init` holds. `fwd_module` is accepted for published scripts:
    a parameter read in another module's forward is gathered in any case.
    """
    units = _units(parameters) if enabled else []
    for unit in units:
        unit.prefetch()
    for unit in units:
        unit.gather()
        unit.pins += 1
    kept = {unit: rest.clone() for unit in units if modifier_rank is None and (rest := unit.rest_within) is not None}
    try:
        yield
        for unit in units:
            if modifier_rank is not None:
                unit.scatter(modifier_rank)
            else:
                unit.written = unit.travels and unit.stage.weight is REPLICATE
    finally:
        for unit in units:
            if unit in kept:
                unit.restore(kept[unit])
            unit.pins -= 1
            unit.awaited = False  # else what was written would be seen again
            unit.release()


def _units(parameters: Gatherable) -> list[Unit]:
    """Return the units of the parameters, each once, in the order in which every rank made them."""
    if isinstance(parameters, nn.Parameter):
        parameters = [parameters]
    elif isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    owners = {owner: None for parameter in parameters if isinstance(owner := owner_of(parameter), Unit)}
    return sorted(owners, key=lambda unit: unit.index)
