"""Whole parameters for a while: gathered on entry, released on exit, with or without what was written meanwhile."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import nn

from shoal.zero.guard import owner_of
from shoal.zero.placement import REPLICATE, SHARD
from shoal.zero.unit import Unit

Gatherable = nn.Parameter | nn.Module | Iterable[nn.Parameter]


@contextmanager
def gathered(parameters: Gatherable, modifier_rank: int | None = None, fwd_module: nn.Module | None = None,
             enabled: bool = True) -> Generator[None]:
    """Hold `parameters` (one, a module's, or an iterable) whole within the context.

    With `modifier_rank` None, what is written into sharded ones is dropped; with a rank, what that rank wrote is taken
    over everywhere, masters included. Every rank of the data axis enters with the same parameters. Works at every stage,
    nests, each context with its own `modifier_rank`, and ignores parameters that no engine and no `zero.Init` holds.
    A tensor or an array that shares their memory for longer (`detach`, `numpy`) keeps it there, for reading: it has the
    values that were last gathered, or of what rests on this rank newer ones.
    `fwd_module` is accepted for published scripts: a parameter read in another module's forward is gathered in any case.
    """
    units = _units(parameters) if enabled else []
    for unit in units:
        unit.prefetch()
    with ExitStack() as whole:
        for unit in units:
            whole.enter_context(_pinned(unit, modifier_rank))
        yield


@contextmanager
def _pinned(unit: Unit, modifier_rank: int | None) -> Generator[None]:
    """Hold one unit; an exception takes nothing over."""
    unit.gather()
    unit.lend()
    unit.pins += 1
    try:
        with _undone(unit) if modifier_rank is None and unit.stage.weight is SHARD else nullcontext():
            yield
        if modifier_rank is not None:
            unit.scatter(modifier_rank)
        elif unit.stage.weight is REPLICATE:
            unit.written = unit.travels
    finally:
        unit.pins -= 1
        unit.awaited = False
        unit.release()


@contextmanager
def _undone(unit: Unit) -> Generator[None]:
    """Drop what is written into sharded weights within the context, unless it is taken over within it.

    Where they rest within the buffer, that is put back; all of it if somebody has it in use. Who came to use it within the
    context finds what rests on every rank.
    """
    used = unit.pins > 1 or unit.held
    now = unit.full if used else unit.rest_within
    copies = [] if now is None else [(now, now.detach().clone())]
    unit.copies += copies
    try:
        yield
    except BaseException:
        unit.held &= used  # its pass is over
        raise
    finally:
        for copy in copies:
            unit.copies = [other for other in unit.copies if other is not copy]
            with torch.no_grad():
                copy[0].copy_(copy[1])
    if not used and (unit.held or unit.pins > 1):
        unit.renew()


def _units(parameters: Gatherable) -> list[Unit]:
    """Return the units of the parameters, each once, in the order in which every rank made them."""
    if isinstance(parameters, nn.Parameter):
        parameters = [parameters]
    elif isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    owners = {owner: None for parameter in parameters if isinstance(owner := owner_of(parameter), Unit)}
    return sorted(owners, key=lambda unit: unit.index)
