"""The contents of a checkpoint: the whole training state as named pieces, independent of the topology.

    weight/NAME        every parameter, in the precision of its master
    KIND/NAME          the optimizer's state of that parameter, of its shape (exp_avg, exp_avg_sq, ...)
    scalar.KIND/NAME   the same where it is one number per parameter (step)
    buffer/NAME        the model's persistent buffers
    published/NAME     the weights as all ranks have them, where ranks publish them as compressed updates
    residual.R/NAME    the compression error of the gradient on rank R of those that hold the parameter, as an addend of the
                       mean, times the loss scale that the checkpoint's values hold

Each rank saves the part of every tensor that lies within its own shards, so that the pieces of all ranks are disjoint and
cover every tensor. On loading it asks for all elements that rest on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.checkpoint import Piece, Snapshot
from shoal.data.loader import Loader
from shoal.device import HOST
from shoal.engine.buffer_sync import is_array, saved_names
from shoal.errors import CheckpointError
from shoal.mesh.tensor_slice import TensorSlice
from shoal.optim.elementwise import count_moments
from shoal.optim.sharded import ShardedOptimizer
from shoal.optim.views import MasterView
from shoal.tier import ResidentSpan, Span, fetched
from shoal.zero.layout import Part, Slot
from shoal.zero.sharded import ShardedModel
from shoal.zero.trainable_unit import TrainableUnit
from shoal.zero.unit import Unit

WEIGHT, BUFFER, PUBLISHED = "weight", "buffer", "published"
RESIDUAL = "residual."
SCALAR, NUMBER = "scalar.", "number."
"""Marks of state that is one value per parameter: a tensor without dims, or a Python number."""
Cuts = Mapping[str, TensorSlice]
Shape = tuple[int, ...]
PIECE_ELEMENTS = 1 << 22
"""Elements of a piece that has to be fetched into memory."""
AWAY_BYTES = 128 << 20
"""Bytes of a file, and of memory to stage it in, when the state is written from where it rests."""


def data_state(loader: Any, optimizer: ShardedOptimizer | None) -> dict[str, Any] | None:
    """Return the state of the loader: within an accumulation that of the last step, for its gradients are not saved."""
    if isinstance(loader, Loader) and optimizer is not None and optimizer.has_gradients:
        return loader.trained_state()
    return None if loader is None else loader.state_dict()


def state_to_save(sharded: ShardedModel, optimizer: ShardedOptimizer | None, call: str, *,
                  exclude_frozen: bool) -> list[Piece]:
    """Return the state of this rank at rest, for `call`, which errors name."""
    if optimizer is not None:
        optimizer.finish_deferred_steps()
    sharded.finish_pending()
    sharded.refuse_replaced(call)
    pieces = list(weights_to_save(sharded))
    if exclude_frozen:
        frozen = {f"{WEIGHT}/{member.name}" for unit in sharded.units if not isinstance(unit, TrainableUnit)
                  for member in unit.members}
        pieces = [piece for piece in pieces if piece.name not in frozen]
    if optimizer is not None:
        pieces += moments_to_save(sharded, optimizer)
        pieces += compression_to_save(sharded)
    return pieces


def is_away(pieces: list[Piece]) -> bool:
    """Whether some pieces do not rest in memory, so that they are written from where they are, while the caller waits."""
    return any(piece.hold is not None for piece in pieces)


def weights_to_save(model: ShardedModel) -> Iterator[Piece]:
    """Yield this rank's share of the parameters and buffers."""
    for unit in model.units:
        for part in unit.layout.parts(unit.saved_range) if unit.replica_group.is_first_copy else ():
            yield from _weight(model, unit, part, unit.saved_range)
    if model.parameter_groups.is_first_copy:
        elsewhere = {f"{BUFFER}/{tied.name}" for tied in model.tied_buffers.values() if not tied.saved_here}
        yield from (piece for piece in _unsharded(model) if piece.name not in elsewhere)


def weights_to_load(model: ShardedModel, snapshot: Snapshot, *, strict: bool) -> Iterator[Piece]:
    """Yield the pieces that rest on this rank, to be filled in place; with `strict` also those that the checkpoint lacks.

    Waits until copies of weights from the host to the device have read them.
    """
    saved = set(snapshot.names())
    for unit in model.units:
        with fetched(unit.high_precision, 0, 0, changed=False):  # a fetch, of no elements too, waits for copies
            pass
        for part in unit.layout.parts(unit.high_precision_range):
            name = f"{WEIGHT}/{unit.layout.slots[part.slot].name}"
            if name in saved or strict:
                yield from _weight(model, unit, part, unit.high_precision_range)
    yield from (piece for piece in _unsharded(model) if strict or piece.name in saved)


def moments_to_save(model: ShardedModel, optimizer: ShardedOptimizer) -> Iterator[Piece]:
    """Yield this rank's share of the optimizer's state."""
    for view, kind, value in optimizer.views.states(optimizer.optimizer):
        for part in view.parts if view.unit.replica_group.is_first_copy else ():
            yield from _moment(view, part, kind, value, model.tensor_slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingMoments:
    """The bytes of this rank's optimizer state that the first step allocates."""

    saved: int
    """Those that this rank saves."""
    in_memory: int
    """Those that host memory holds."""


def coming_moments(optimizer: ShardedOptimizer) -> ComingMoments:
    """Measure the state that views without state get at their first step, except for scalars."""
    inner = optimizer.optimizer
    views = [view for view in optimizer.views.views if not inner.state.get(view.parameter)]
    moments = count_moments(type(inner), inner.defaults) if views else 0
    saved = in_memory = 0
    for view in views:
        size = moments * view.parameter.dtype.itemsize
        if view.unit.replica_group.is_first_copy:
            saved += size * sum(len(_saved_elements(view, part)) for part in view.parts)
        if view.parameter.device == HOST and view.unit.state.store.granule is None:
            in_memory += size * view.parameter.numel()
    return ComingMoments(saved=saved, in_memory=in_memory)


class MomentSource(Protocol):
    """Saved state, by the names of pieces."""

    def names(self) -> list[str]:
        """Return the names of all pieces."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return the whole value of a piece that is one number per parameter."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a piece."""
        ...


def moments_to_load(model: ShardedModel, optimizer: ShardedOptimizer, snapshot: MomentSource) -> Iterator[Piece]:
    """Allocate the optimizer's state as the checkpoint has it, and yield the tensors to fill.

    Slots whose saved scalars differ (one was stepped less often) end in views of their own.
    """
    names = set(snapshot.names())
    kinds = sorted(kind for kind in {name.partition("/")[0] for name in names} - {WEIGHT, BUFFER, PUBLISHED}
                   if not kind.startswith(RESIDUAL))

    def saved(view: MasterView, part: Part) -> tuple[tuple[str, float | None], ...]:
        slot = view.unit.layout.slots[part.slot].name
        return tuple((kind, snapshot.tensor(f"{kind}/{slot}").item() if kind.startswith((SCALAR, NUMBER)) else None)
                     for kind in kinds if f"{kind}/{slot}" in names)

    optimizer.views.split(saved, optimizer.optimizer)
    for view in optimizer.views.views:
        state: dict[str, Tensor | float] = {}
        for kind, scalar in saved(view, view.parts[0]):
            dtype = snapshot.dtype(f"{kind}/{view.unit.layout.slots[view.parts[0].slot].name}")
            if scalar is None:
                whole = view.unit.state.moment(kind, _state_dtype(view, dtype))
                state[kind] = whole[view.start:view.stop]
                yield from _moment_pieces(view, kind, model.tensor_slices)
            elif kind.startswith(NUMBER):
                state[kind.removeprefix(NUMBER)] = scalar
            else:
                place = view.number_device(optimizer.optimizer.param_groups[view.group])
                state[kind.removeprefix(SCALAR)] = torch.tensor(scalar, dtype=dtype, device=place)
        optimizer.optimizer.state[view.parameter] = state


def compression_to_save(model: ShardedModel) -> Iterator[Piece]:
    """Yield the state of compressed communication: this rank's slices of published weights, and its compression error."""
    for unit in model.trainable:
        if unit.state.follows_publication:
            yield from published_pieces(unit, model.tensor_slices)
        if unit.gradient.accumulator.residual is not None:
            yield from residual_pieces(unit, unit.gradient.accumulator.residual, unit.communicator.rank, model.tensor_slices)


def published_pieces(unit: Unit, cuts: Cuts) -> Iterator[Piece]:
    """Yield this rank's slices of the weights that all ranks have."""
    for part in unit.layout.parts(unit.shard_range):
        slot = unit.layout.slots[part.slot]
        yield from _pieces(ResidentSpan(unit.full), slot.start + part.start, PUBLISHED, slot,
                           range(part.start, part.stop), cuts)


def residual_pieces(unit: Unit, residual: Tensor, rank: int, cuts: Cuts) -> Iterator[Piece]:
    """Yield the slots of `residual` (size,), the compression error of rank `rank`."""
    for slot in unit.layout.slots:
        elements = range(slot.stop - slot.start)
        yield from _pieces(ResidentSpan(residual), slot.start, f"{RESIDUAL}{rank}", slot, elements, cuts)


def residual_ranks(snapshot: Snapshot) -> dict[str, int]:
    """Return for each parameter how many ranks have saved a residual."""
    ranks: dict[str, int] = {}
    for kind, _, name in (each.partition("/") for each in snapshot.names()):
        if kind.startswith(RESIDUAL):
            ranks[name] = max(ranks.get(name, 0), 1 + int(kind.removeprefix(RESIDUAL)))
    return ranks


def parameter_shapes(model: ShardedModel) -> dict[str, list[int]]:
    """Return the global shape of every parameter of this rank by its first name."""
    return {name: list(model.tensor_slices[name].shape(shape) if name in model.tensor_slices else shape)
            for name, shape in ((name, tuple(parameter.shape)) for name, parameter in model.named().items())}


def group_names(model: ShardedModel, optimizer: ShardedOptimizer) -> list[list[str]]:
    """Return the names of this rank's parameters in each optimizer group, in the order of the model."""
    group_of = {slot.name: slot.group for unit in model.trainable for slot in unit.layout.slots}
    return [[name for name in model.named() if group_of.get(name) == group]
            for group in range(len(optimizer.param_groups))]


def _weight(model: ShardedModel, unit: Unit, part: Part, span: range) -> Iterator[Piece]:
    slot = unit.layout.slots[part.slot]
    at = span.start + part.offset - unit.high_precision_range.start
    yield from _pieces(unit.high_precision, at, WEIGHT, slot, range(part.start, part.stop), model.tensor_slices)


def _moment_pieces(view: MasterView, kind: str, cuts: Cuts) -> Iterator[Piece]:
    """Yield the pieces of a moment of a view, slot by slot."""
    for part in view.parts:
        slot = view.unit.layout.slots[part.slot]
        yield from _pieces(view.unit.state.moments[kind], part.offset, kind, slot, range(part.start, part.stop), cuts)


def _pieces(span: Span, at: int, kind: str, slot: Slot, elements: range, cuts: Cuts) -> Iterator[Piece]:
    """Yield `elements` of a slot, which begin at `at` of a span, in small pieces if the span does not rest in memory."""
    resident = isinstance(span, ResidentSpan)
    for run in flat_to_boxes(slot.shape, elements, cuts.get(slot.name)):
        step = max(1, len(run.local)) if resident else PIECE_ELEMENTS
        for start in range(run.local.start, run.local.stop, step):
            stop = min(start + step, run.local.stop)
            here = range(at + start - elements.start, at + stop - elements.start)
            first = run.start + start - run.local.start
            yield Piece(name=f"{kind}/{slot.name}", shape=run.shape, start=first, stop=first + stop - start,
                        data=span.tensor[here.start:here.stop], offset=run.offset, size=run.size,
                        hold=None if resident else partial(_hold, span, here))


def _hold(span: Span, part: range, changed: bool) -> AbstractContextManager[Tensor]:
    return fetched(span, part.start, part.stop, changed=changed)


def _moment(view: MasterView, part: Part, kind: str, value: Tensor | float, cuts: Cuts) -> Iterator[Piece]:
    """Yield the piece of a slot's state that this rank saves; the rank of the first element saves a scalar."""
    unit = view.unit
    slot = unit.layout.slots[part.slot]
    elements = _saved_elements(view, part)
    start, stop = elements.start, elements.stop
    if not elements:
        return
    if isinstance(value, Tensor) and value.dim():
        at = start - unit.master_range.start
        span, at = (unit.state.moments[kind], at) if kind in unit.state.moments else (ResidentSpan(value), at - view.start)
        yield from _pieces(span, at, kind, slot, range(start - slot.start, stop - slot.start), cuts)
    elif start == slot.start and (slot.name not in cuts or cuts[slot.name].rank == 0):
        prefix, scalar = (SCALAR, value) if isinstance(value, Tensor) else (
            NUMBER, torch.tensor(value, dtype=torch.float64, device="cpu"))
        yield Piece(name=f"{prefix}{kind}/{slot.name}", shape=(), start=0, stop=1, data=scalar.reshape(1))


def _saved_elements(view: MasterView, part: Part) -> range:
    """Return the elements of the unit's layout that this rank saves of a part of a view."""
    first, own = view.unit.layout.slots[part.slot].start, view.unit.saved_range
    return range(max(first + part.start, own.start), min(first + part.stop, own.stop))


def _state_dtype(view: MasterView, saved: torch.dtype) -> torch.dtype:
    return view.parameter.dtype if saved.is_floating_point else saved


def _unsharded(model: ShardedModel) -> Iterator[Piece]:
    """Yield the tensors that every rank holds whole: buffers, and parameters that no unit holds."""
    in_units = {member.name for unit in model.units for member in unit.members}
    persistent = saved_names(model.model)
    for name, parameter in model.named().items():
        if name not in in_units:
            yield _flat(f"{WEIGHT}/{name}", parameter.data)
    for name, buffer in model.model.named_buffers():
        if name in persistent and is_array(buffer):
            tied = model.tied_buffers.get(name)
            yield _flat(f"{BUFFER}/{name if tied is None else tied.name}", buffer)


def _flat(name: str, tensor: Tensor) -> Piece:
    if not tensor.is_contiguous():
        raise CheckpointError(f"{name}: the tensor is not contiguous; register a contiguous one")
    return Piece(name=name, shape=tuple(tensor.shape), start=0, stop=tensor.numel(), data=tensor.view(-1))


# Flat intervals of a rank's parameter, as intervals of boxes of the global tensor. A parameter that no tensor rank cuts is
# the global tensor. Of one that is cut, each segment of rows is a box, and elements that are contiguous in the parameter's
# memory are one interval. Rows that no segment covers are padding, and lie in no box.


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRun:
    """A run of a parameter's elements as an interval of a box of the global tensor."""

    local: range
    """The elements, in the row-major order of this rank's parameter."""
    start: int
    """The first of them, in the row-major order of the box."""
    shape: Shape
    """The shape of the global tensor."""
    offset: Shape | None = None
    size: Shape | None = None
    """The box; None: the whole tensor."""


def flat_to_boxes(shape: Shape, elements: range, cut: TensorSlice | None) -> Iterator[BoxRun]:
    """Yield the positions in the global tensor of `elements` of this rank's parameter of `shape`, which is its `cut`."""
    if cut is None:
        yield BoxRun(local=elements, start=elements.start, shape=shape)
        return
    dim, inner, rows = cut.dim, prod(shape[cut.dim + 1:]), shape[cut.dim]
    whole = len(cut.segments) == 1 and cut.segments[0].length == rows
    lead = shape[:dim] if not whole else ()  # one box holds the whole parameter, and each run of it is one run of the box
    for index in range(elements.start // max(1, rows * inner), -(-elements.stop // max(1, rows * inner))) if lead else (0,):
        at = index * rows * inner
        for segment in cut.segments:
            extent = segment.length * inner * (prod(shape[:dim]) if whole else 1)
            first = at + segment.target * inner
            run = range(max(elements.start, first), min(elements.stop, first + extent))
            if not run:
                continue
            offset = [*_unravel(index, shape[:dim]), segment.source, *([0] * (len(shape) - dim - 1))]
            size = [*([1] * dim if not whole else shape[:dim]), segment.length, *shape[dim + 1:]]
            yield BoxRun(local=run, start=run.start - first, shape=cut.shape(shape), offset=tuple(offset), size=tuple(size))


def _unravel(index: int, shape: Shape) -> list[int]:
    """Return the coordinates of the element `index` of a row-major tensor."""
    coordinates: list[int] = []
    for extent in reversed(shape):
        coordinates.insert(0, index % extent)
        index //= extent
    return coordinates
