"""`exp_avg_mask`, the option of a group that masks momentum: past the warm-up the momentum is multiplied by it.

A sign cannot encode zero. An element whose gradient is always zero, such as a position embedding that no sequence reaches,
receives plus and minus the scale of its block in turns: zero on average, but not at each step. The mask is 0 for such
elements and 1 for all others.

With mask k the momentum after a step is k (beta1 m + (1 - beta1) g). The norm, the variance and the look-ahead read g too,
so k multiplies m and g before the step, and the step itself needs no mask. Weight decay applies to masked elements as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from shoal.errors import ConfigError
from shoal.log import warn_once
from shoal.mesh.tensor_slice import TensorSlice, slice_of
from shoal.optim.compressed import CompressedOptimizer, next_step_number
from shoal.optim.views import MasterView
from shoal.zero.layout import Slot
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["MASK", "apply_masks", "boxes", "check_masks", "masked_gradient", "warn_of_masks"]

MASK = "exp_avg_mask"
"""The group option, under its published name."""

_Groups = Sequence[Mapping[str, Any]]


def check_masks(units: Iterable[TrainableUnit], groups: _Groups, slices: Mapping[str, TensorSlice]) -> None:
    """Raise `ConfigError` unless each group's mask fits each of its parameters, or the whole tensor of which `slices` gives
    this rank's slice.
    """
    for unit in units:
        for slot in unit.layout.slots:
            if (given := groups[slot.group].get(MASK)) is not None:
                _slot_mask(given, slot, slices)


def warn_of_masks(groups: _Groups, name: str) -> None:
    """Warn once that masks have no effect because the optimizer `name` does not compress."""
    masked = [str(index) for index, group in enumerate(groups) if group.get(MASK) is not None]
    if masked:
        warn_once(f"optimizer group {', '.join(masked)}: {MASK} has no effect with {name or 'this optimizer'}, which does "
                  f"not compress; name OneBitAdam, ZeroOneAdam or OneBitLamb, or remove it")


def apply_masks(optimizer: CompressedOptimizer, units: Sequence[TrainableUnit], views: Iterable[MasterView],
                slices: Mapping[str, TensorSlice]) -> None:
    """Multiply the reduced gradients, their uncompressed addends and the momenta of `views` in place by the masks.

    Call it before the gradient norm is computed. Raises `ConfigError`, before anything changes, for a mask that does not fit
    the parameters of `units`.
    """
    check_masks(units, optimizer.param_groups, slices)
    for view in views:
        state, gradient = optimizer.state.get(view.parameter, {}), view.unit.gradient
        given = _mask_of(optimizer, optimizer.param_groups[view.group], state)
        if given is None or not gradient.has_gradient:
            continue
        addend, _ = view.unit.transport.exact_addend(view.part) or (None, 1)
        vectors = [each for each in (gradient.at_rest(view.part), addend, state.get("exp_avg")) if each is not None]
        for part in view.parts:
            slot, at = view.unit.layout.slots[part.slot], part.offset - view.start
            mask = _slot_mask(given, slot, slices)
            for shape, box in boxes(mask, slot.shape, part.start, part.stop):
                here, end = box.to(vectors[0].device), at + prod(shape)
                for vector in vectors:
                    vector[at:end].view(shape).mul_(here)
                at = end


def masked_gradient(optimizer: CompressedOptimizer, weight: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return the masked gradient of a whole parameter that `optimizer` steps without an engine; mask its momentum in place.

    Raises `ConfigError` for a mask that does not fit.
    """
    state, gradient = optimizer.state.get(weight, {}), weight.grad
    assert gradient is not None
    given = _mask_of(optimizer, group, state)
    if given is None:
        return gradient
    mask = _broadcastable_mask(given, tuple(weight.shape), None, type(optimizer).__name__, "a parameter").to(gradient)
    if "exp_avg" in state:
        state["exp_avg"].mul_(mask)
    return gradient * mask


def boxes(mask: Tensor, shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Cut elements [start, stop) of a tensor of `shape`, in row-major order, into boxes.

    Yields the shape of each box and the view of `mask` that expands to it. `mask` has as many dims as `shape`, each of that
    size or of 1, and is never expanded in memory.
    """
    if not shape:
        yield shape, mask
        return
    row, at = prod(shape[1:]), start
    while at < stop:
        first, within = divmod(at, row)
        rows = (stop - at) // row
        if within or not rows:
            end = min(stop, (first + 1) * row)
            yield from boxes(_rows(mask, first, 1)[0], shape[1:], within, end - first * row)
        else:
            end = at + rows * row
            yield (rows, *shape[1:]), _rows(mask, first, rows)
        at = end


def _rows(mask: Tensor, first: int, count: int) -> Tensor:
    return mask if mask.shape[0] == 1 else mask[first:first + count]


def _mask_of(optimizer: CompressedOptimizer, group: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
    """Return the mask of a group if the next step of a tensor of `state` is past the warm-up, else None."""
    given = group.get(MASK)
    if given is None:
        return None
    time = max(next_step_number(group), 1 + int(state["step"].item()) if "step" in state else 1)
    return given if time > optimizer.warmup_steps(group) else None


def _slot_mask(given: Any, slot: Slot, slices: Mapping[str, TensorSlice]) -> Tensor:
    where = f"optimizer group {slot.group}"
    return _broadcastable_mask(given, slot.shape, slices.get(slot.name), where, f"'{slot.name}'")


def _broadcastable_mask(given: Any, shape: tuple[int, ...], cut: TensorSlice | None, where: str, what: str) -> Tensor:
    """Return the mask of a parameter of `shape`, with as many dims.

    `given` must broadcast to `shape`, or to the whole tensor of which the parameter is the slice `cut`. Otherwise it raises
    `ConfigError`, which names `where` and `what`.
    """
    wanted = shape if cut is None else cut.shape(shape)
    if isinstance(given, Tensor) and given.dim() <= len(shape):
        mask = given.reshape((1,) * (len(shape) - given.dim()) + tuple(given.shape))
        if _broadcasts(mask, shape):
            return mask
        if cut is not None and _broadcasts(mask, wanted):
            return slice_of(mask, cut, extent=shape[cut.dim])
    got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
    part = "" if cut is None else f", of which this rank holds {shape}"
    raise ConfigError(f"{where}: {MASK}: got {got} for {what} of shape {wanted}{part}; give a tensor of 0 and 1 of that "
                      f"shape, or of one that can be expanded to it, and parameters of other shapes other groups")


def _broadcasts(mask: Tensor, shape: tuple[int, ...]) -> bool:
    return all(size in (1, there) for size, there in zip(mask.shape, shape, strict=True))
