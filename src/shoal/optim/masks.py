"""Elements that the `exp_avg_mask` of a group leaves out: past the warm-up their momentum is multiplied by it.

Signs know no zero. An element whose gradient is always zero, such as the places of a table that no sequence reaches, comes
as plus and minus its block's scale in turns, which adds up to nothing, but is not nothing step by step. A mask says where
that is so: 0 leaves an element out, 1 keeps it.

The momentum that a step leaves is k (beta1 m + (1 - beta1) g), k being the mask: as g is taken more than once, by the norm,
by the variance and by what looks ahead, k multiplies m and g before the step, which then knows of no mask. Weight decay is
none of the momentum, and shrinks what is left out like the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from shoal.errors import ConfigError
from shoal.log import warn_once
from shoal.mesh.tensor_slice import TensorSlice, slice_of
from shoal.optim.compressed import CompressedOptimizer, next_time
from shoal.optim.views import MasterView
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["MASK", "boxes", "check_masks", "kept_of", "leave_out", "warn_of_masks"]

MASK = "exp_avg_mask"
"""The option of a group, as published."""

_Groups = Sequence[Mapping[str, Any]]


def check_masks(units: Iterable[TrainableUnit], groups: _Groups, cuts: Mapping[str, TensorSlice]) -> None:
    """Raise `ConfigError` unless the mask of each group fits each of its parameters, or the tensors that `cuts` cut."""
    for unit in units:
        for slot in unit.layout.slots:
            if (given := groups[slot.group].get(MASK)) is not None:
                _fitted(given, slot.shape, cuts.get(slot.name), f"optimizer group {slot.group}", f"'{slot.name}'")


def warn_of_masks(groups: _Groups, name: str) -> None:
    """Say once of masks that they have no effect, the optimizer `name` being none that compresses."""
    masked = [str(index) for index, group in enumerate(groups) if group.get(MASK) is not None]
    if masked:
        warn_once(f"optimizer group {', '.join(masked)}: {MASK} has no effect with {name or 'this optimizer'}, of which "
                  f"nothing travels as signs; name OneBitAdam, ZeroOneAdam or OneBitLamb, or remove it")


def leave_out(optimizer: CompressedOptimizer, units: Sequence[TrainableUnit], views: Iterable[MasterView],
              cuts: Mapping[str, TensorSlice]) -> None:
    """Take what the masks leave out from the reduced gradients, their exact addends and the momenta of `views`, those of
    `units`, where they rest: before a step judges them.

    Raises `ConfigError`, before anything changes, for a mask that does not fit.
    """
    check_masks(units, optimizer.param_groups, cuts)
    for view in views:
        state, gradient = optimizer.state.get(view.parameter, {}), view.unit.gradient
        given = _mask_of(optimizer, optimizer.param_groups[view.group], state)
        if given is None or not gradient.pending:
            continue
        addend, _ = view.unit.transport.exact_addend(view.part) or (None, 1)
        vectors = [each for each in (gradient.at_rest(view.part), addend, state.get("exp_avg")) if each is not None]
        for part in view.parts:
            slot, at = view.unit.layout.slots[part.slot], part.offset - view.start
            mask = _fitted(given, slot.shape, cuts.get(slot.name), f"optimizer group {slot.group}", f"'{slot.name}'")
            for shape, box in boxes(mask, slot.shape, part.start, part.stop):
                here, end = box.to(vectors[0].device), at + prod(shape)
                for vector in vectors:
                    vector[at:end].view(shape).mul_(here)
                at = end


def kept_of(optimizer: CompressedOptimizer, weight: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return the gradient of a whole parameter that `optimizer` steps by itself, without what its mask leaves out, of which
    its momentum then holds nothing.

    Raises `ConfigError` for a mask that does not fit.
    """
    state, gradient = optimizer.state.get(weight, {}), weight.grad
    assert gradient is not None
    given = _mask_of(optimizer, group, state)
    if given is None:
        return gradient
    mask = _fitted(given, tuple(weight.shape), None, type(optimizer).__name__, "a parameter").to(gradient)
    if "exp_avg" in state:
        state["exp_avg"].mul_(mask)
    return gradient * mask


def boxes(mask: Tensor, shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Cut elements [start, stop) of a tensor of `shape`, in row-major order, into boxes: the shape of each, and the view of
    `mask` that expands to it.

    `mask` has as many dims as `shape`, each of that size or of 1, so that nothing is as large as what it stands for.
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
    """Return what is given as the mask of a group, if the next step of a tensor of `state` is past the warm-up."""
    given = group.get(MASK)
    if given is None:
        return None
    time = max(next_time(group), 1 + int(state["step"].item()) if "step" in state else 1)
    return given if time > optimizer.warm_up(group) else None


def _fitted(given: Any, shape: tuple[int, ...], cut: TensorSlice | None, where: str, what: str) -> Tensor:
    """Return the mask of a parameter of `shape`, with as many dims: `given` is of that shape, or of the one that is `cut`.

    Raises `ConfigError`, which says `where` and of `what`, if it is of neither, and expands to neither.
    """
    wanted = shape if cut is None else cut.shape(shape)
    if isinstance(given, Tensor) and given.dim() <= len(shape):
        mask = given.reshape((1,) * (len(shape) - given.dim()) + tuple(given.shape))
        if _expands(mask, shape):
            return mask
        if cut is not None and _expands(mask, wanted):
            return slice_of(mask, cut, extent=shape[cut.dim])
    got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
    part = "" if cut is None else f", of which this rank holds {shape}"
    raise ConfigError(f"{where}: {MASK}: got {got} for {what} of shape {wanted}{part}; give a tensor of 0 and 1 of that "
                      f"shape, or of one that can be expanded to it, and parameters of other shapes other groups")


def _expands(mask: Tensor, shape: tuple[int, ...]) -> bool:
    return all(size in (1, there) for size, there in zip(mask.shape, shape, strict=True))
