"""The context `gathered`: parameters are whole within it and released on exit; writes are taken over or dropped."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, nullcontext
from typing import SupportsIndex

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.log import warn_once
from shoal.tier import ResidentSpan
from shoal.zero.other_memory import load_replaced, take_over
from shoal.zero.ownership import owner_of
from shoal.zero.saved_tensors import tracked
from shoal.zero.unit import Unit
from shoal.zero.unit_state import Hold

Gatherable = nn.Parameter | nn.Module | Iterable[nn.Parameter | None] | None


@contextmanager
def gathered(parameters: Gatherable, modifier_rank: int | None = None, fwd_module: nn.Module | None = None,
             enabled: bool = True) -> Generator[None]:
    """Hold `parameters` (one, a module's, or an iterable) whole within the context. None, an absent bias, is passed over.

    With `modifier_rank` None, what is written into sharded ones is dropped, with a warning; with a rank, what that rank
    wrote is taken over everywhere, masters included. Every rank of the data axis enters with the same parameters. Works at
    every stage, nests, each context with its own `modifier_rank`, and ignores parameters that no engine and no `zero.Init`
    holds.
    A tensor or an array that shares their memory for longer (`detach`, `numpy`) keeps it there, for reading: it has the
    values that were last gathered, or of what rests on this rank newer ones.
    What autograd saves of them within the context is gathered again by backward: a loss may be made of them.
    `fwd_module` is accepted for published scripts: a parameter read in another module's forward is gathered in any case.
    Raises `UsageError` for anything else than parameters, and for a `modifier_rank` that is no number.
    """
    _check_rank(modifier_rank)
    units = _units(parameters) if enabled else []
    for unit in units:
        unit.prefetch()
    dropped: list[str] = []
    with tracked(units), ExitStack() as whole:
        for unit in units:
            whole.enter_context(_held(unit, modifier_rank, dropped))
        yield
    if dropped:
        warn_once(f"gathered: parameter '{dropped[-1]}' was written within the context, and is as before: without "
                  f"modifier_rank writes are dropped at its end. Add modifier_rank=0 to keep what rank 0 wrote")


def _check_rank(given: object) -> None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, SupportsIndex)):
        raise UsageError(f"gathered: modifier_rank: got a {type(given).__name__}; give the number of a rank or None, and "
                         f"several modules as one list of parameters: gathered([*a.parameters(), *b.parameters()])")


@contextmanager
def _held(unit: Unit, modifier_rank: int | None, dropped: list[str]) -> Generator[None]:
    """Hold one unit gathered; after an exception nothing written is taken over."""
    unit.gather()
    unit.hold(Hold.CONTEXT)
    try:
        with _writes_dropped(unit, dropped) if modifier_rank is None and not unit.keeps_writes else nullcontext():
            try:
                yield
            finally:
                if unit.keeps_writes:
                    load_replaced(unit)
                else:
                    take_over(unit, keep=False)
        if modifier_rank is not None:
            unit.broadcast_edit(modifier_rank)
        elif unit.keeps_writes:
            unit.memory.mark_dirty()
    finally:
        unit.end_hold(Hold.CONTEXT | Hold.REUSE)
        unit.release()


@contextmanager
def _writes_dropped(unit: Unit, dropped: list[str]) -> Generator[None]:
    """Drop the writes into sharded weights within the context, unless an inner context takes them over.

    `dropped` gets the name of a parameter that this rank finds changed.

    Where the resting weights lie within the buffer, these are restored; the whole buffer if another reader holds it. Readers
    that arrive inside the context get the restored shards.
    """
    used, written = unit.readers > 1, any(unit.versions.since)
    whole = used or written  # what was written before is to stay
    memory = unit.full if whole else unit.rest.tensor if unit.memory.rests_in_full else None
    values = None if memory is None else unit.memory.take_snapshot(memory)
    try:
        yield
        dropped += _changed(unit, unit.full if whole else unit.full[unit.shard_range.start:unit.shard_range.stop], values)
    except BaseException:
        if not used:
            unit.end_hold(Hold.FOREIGN_READ)  # the pass that read it is over
        raise
    finally:
        if values is not None:
            unit.memory.restore(values)
        if not written:
            unit.versions.see()
    if not used and unit.readers > 1:
        unit.refresh_full()


def _changed(unit: Unit, memory: Tensor, before: Tensor | None) -> list[str]:
    """Return the name of the first parameter whose bits in `memory`, a part of the full buffer, are not those `before`.

    Without a copy the resting shard is the comparison, where it is in the same memory as the buffer.
    """
    if before is None and isinstance(unit.rest, ResidentSpan) and unit.rest.tensor.device == memory.device:
        before = unit.rest.tensor
    if before is None or torch.equal(memory.detach().view(torch.uint8), before.view(torch.uint8)):
        return []
    first = int((memory.detach().view(torch.uint8) != before.view(torch.uint8)).nonzero()[0]) // memory.element_size()
    place = first + memory.storage_offset() - unit.full.storage_offset()
    return [member.name for slot, member in zip(unit.layout.slots, unit.members, strict=True)
            if slot.start <= place < slot.start + member.parameter.numel()]


def _units(parameters: Gatherable) -> list[Unit]:
    """Return the units of the parameters, each once, in the order in which every rank made them."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        parameters = [parameters]
    owners: dict[Unit, None] = {}
    for parameter in parameters:
        if not isinstance(parameter, Tensor | None):  # pyright: ignore[reportUnnecessaryIsInstance]  scripts pass names
            raise UsageError(f"gathered: got {parameter!r}; give a parameter, a module, or an iterable of parameters")
        if parameter is not None and isinstance(owner := owner_of(parameter), Unit):
            owners[owner] = None
    return sorted(owners, key=lambda unit: unit.index)
