"""Parameters of one gathered unit that a script has given other memory: find them, check them, take their values over.

`replaced.py` asks for those of a model, before a forward and before a step; a unit by itself, before it is released.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.zero.layout import Layout
from shoal.zero.unit_state import Member, PendingStep
from shoal.zero.weight_memory import WeightMemory

__all__ = ["Gathered", "check_fit", "load_replaced", "replaced_slots", "take_over"]


class Gathered(Protocol):
    """The part of a unit that these functions use."""

    members: tuple[Member, ...]
    layout: Layout
    memory: WeightMemory
    full: Tensor
    pending: PendingStep | None

    @property
    def reshards(self) -> bool:
        """Whether the weights are released between their uses."""
        ...

    @property
    def holds_values(self) -> bool:
        """Whether the whole buffer holds the weights."""
        ...

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Save writes to `slots` to the resting weights and the master."""
        ...


@torch.no_grad()
def load_replaced(unit: Gathered) -> None:
    """Copy the values of gathered parameters with other memory into the buffer of `unit`, where they rest, masters included.

    Autograd counts them as writes by the script. Raises `UsageError` as `take_over` does.
    """
    if changed := take_over(unit):
        unit.keep_slots(changed)


@torch.no_grad()
def take_over(unit: Gathered, *, keep: bool = True) -> list[int]:
    """Copy the values of gathered parameters with other memory into the buffer of `unit`, and make them its views again.

    Returns the slots whose values the buffer did not have. With `keep` the caller has them rest. Raises `UsageError` for
    values that the buffer cannot hold; parameters that are released next become views of it all the same. Raises it too
    where backward has stepped the unit: its thread, or a copy to the device, may write to the buffer.
    """
    if not (slots := replaced_slots(unit)):
        return []
    if unit.pending is not None and unit.pending.in_backward:
        raise UsageError(
            f"parameter '{unit.members[slots[0]].name}' was given other memory (p.data = ...) since backward stepped its "
            f"unit (offload_optimizer.step_in_backward), and the new value or the step would be lost: swap the former "
            f"memory in again and call engine.step(), assign after it, or set step_in_backward to false")
    is_shared = keep and unit.memory.is_shared(views=len(slots))  # asked before there are more views
    views = unit.layout.views(unit.full)
    try:
        check_fit(unit)
        if is_shared:
            raise UsageError(
                f"parameter '{unit.members[slots[0]].name}' was given other memory (p.data = ...) while another tensor "
                f"shares its former memory, which rests in another tier between uses and takes the new value: keep a copy "
                f"instead, `backup = p.data.clone()`")
    except UsageError:
        for slot in slots if unit.reshards else ():
            unit.members[slot].parameter.data = views[slot]
        raise
    changed: list[int] = []
    for slot in slots:
        parameter = unit.members[slot].parameter
        value = parameter.detach()
        if not torch.equal(value, views[slot]):  # else the masters keep their precision
            views[slot].copy_(value.clone())  # it may be a transposed view of the same memory
            changed.append(slot)
        parameter.data = views[slot]
    return changed


def check_fit(unit: Gathered, others: Iterable[Gathered] = ()) -> None:
    """Raise `UsageError` for a parameter whose value the buffer of `unit` cannot hold, or that lies in that of `others`."""
    if slots := replaced_slots(unit):
        buffers = {other.full.untyped_storage().data_ptr() for other in (unit, *others)}
        views = unit.layout.views(unit.full)
        for slot in slots:
            _check_fits(unit.members[slot].name, unit.members[slot].parameter.detach(), views[slot], buffers)


def replaced_slots(unit: Gathered) -> list[int]:
    """Return the slots of a gathered unit whose parameters are no views of its buffer; none of another."""
    if not unit.holds_values:
        return []
    start, width = unit.full.data_ptr(), unit.full.element_size()
    return [index for index, (slot, member) in enumerate(zip(unit.layout.slots, unit.members, strict=True))
            if (member.parameter.data_ptr() != start + slot.start * width and member.parameter.numel() > 0)
            or not member.parameter.is_contiguous()]


def _check_fits(name: str, value: Tensor, view: Tensor, buffers: set[int]) -> None:
    """Raise `UsageError` unless `value`, which parameter `name` has now, fits its place `view` in one of the `buffers`."""
    got, wanted = (f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" for tensor in (value, view))
    if got != wanted:
        raise UsageError(
            f"parameter '{name}' became {got} after initialize (p.data = ..., model.half(), model.to(...)), and the engine "
            f"trains it as {wanted}. Convert the model back, convert it before initialize, or set fp16 or bf16 in the "
            f"configuration")
    start, stop = view.data_ptr(), view.data_ptr() + view.nbytes
    if value.untyped_storage().data_ptr() in buffers and not start <= value.data_ptr() < stop:
        raise UsageError(
            f"parameter '{name}' was given the memory of another parameter after initialize (p.data = other.data), and the "
            f"engine trains each in its own: assign other.data.clone(), or share the Parameter itself before initialize")
