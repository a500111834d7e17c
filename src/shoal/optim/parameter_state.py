"""Read and write the stored state of one parameter: its master, its reduced gradient, its moments.

    state = ParameterState.of(optimizer, parameter)
    state.full(MASTER)                 every rank calls it, and gets the whole value in fp32
    state.write_full("exp_avg", value)
    state.local(GRADIENT)              this rank's slice, flat; may be empty

Every value is in fp32 and without the loss scale, whatever the dtype and the tier in which it rests. A moment that the
optimizer has not allocated yet reads as zeros.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.optim.elementwise import blank_state
from shoal.optim.sharded import ShardedOptimizer
from shoal.optim.views import STATE_IS_KEPT, MasterView
from shoal.tier import fetched
from shoal.zero.layout import Slot
from shoal.zero.ownership import owner_of
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["GRADIENT", "MASTER", "ParameterState", "ReplicatedState", "SlicedState"]

MASTER = "master"
GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Elements of the parameter, from `start` on, as they rest."""

    start: int
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """The state of one trained parameter. `MASTER`, `GRADIENT` and names of moments are its kinds."""

    optimizer: ShardedOptimizer
    unit: TrainableUnit
    slot: Slot

    @classmethod
    def of(cls, optimizer: ShardedOptimizer, parameter: nn.Parameter) -> ParameterState | None:
        """Return the state of `parameter`, None if `optimizer` does not step it."""
        unit = owner_of(parameter)
        if not isinstance(unit, TrainableUnit) or not optimizer.trains(unit):
            return None
        index = next(index for index, member in enumerate(unit.members) if member.parameter is parameter)
        return cls(optimizer=optimizer, unit=unit, slot=unit.layout.slots[index])

    def kinds(self) -> list[str]:
        """Return the names of the moments."""
        inner = self.optimizer.optimizer
        return [kind for kind, value in blank_state(type(inner), inner.defaults).items() if value.dim()]

    @torch.no_grad()
    def local(self, kind: str) -> Tensor | None:
        """Return this rank's slice in fp32, flat; None where there is no such state at present."""
        if not self._exists(kind):
            return None
        with self._pieces(kind, changed=False) as pieces:
            none = torch.empty(0, dtype=torch.float32, device="cpu")
            return torch.cat([none, *(piece.values.float().cpu() for piece in pieces)]).div_(
                self._factor(kind)).to(self.unit.full.device)

    @torch.no_grad()
    def full(self, kind: str) -> Tensor | None:
        """Return the whole value in fp32, of the parameter's shape; None where there is none. Ranks call it together."""
        if not self._exists(kind, together=True):
            return None
        owned = self.unit.master_range
        own = torch.zeros(len(owned), dtype=torch.float32, device=self.unit.full.device)
        with self._pieces(kind, changed=False) as pieces:
            for piece in pieces:
                at = self.slot.start + piece.start - owned.start
                own[at:at + piece.values.numel()].copy_(piece.values)
        whole = self.unit.gather_shards(own)
        return whole[self.slot.start:self.slot.stop].view(self.slot.shape).div_(self._factor(kind)).clone()

    @torch.no_grad()
    def write_local(self, kind: str, value: Tensor) -> bool:
        """Write this rank's slice, flat; returns False where there is no such state at present."""
        if not self._exists(kind):
            return False
        with self._pieces(kind, changed=True) as pieces:
            size = sum(piece.values.numel() for piece in pieces)
            if value.numel() != size:
                raise UsageError(f"{self.slot.name}: got {value.numel()} elements for this rank's slice of {kind}, which "
                                 f"has {size}")
            flat, at = value.reshape(-1).to(torch.float32) * self._factor(kind), 0
            for piece in pieces:
                piece.values.copy_(flat[at:at + piece.values.numel()])
                at += piece.values.numel()
        self._written(kind)
        return True

    @torch.no_grad()
    def write_full(self, kind: str, value: Tensor) -> bool:
        """Write the whole value, which is the same on every rank; returns False where there is no such state at present."""
        if not self._exists(kind, together=True):
            return False
        if value.numel() != self.slot.stop - self.slot.start:
            raise UsageError(f"{self.slot.name}: got a tensor of shape {tuple(value.shape)}; it must have the parameter's "
                             f"shape {self.slot.shape}")
        flat = value.reshape(-1).to(torch.float32) * self._factor(kind)
        with self._pieces(kind, changed=True) as pieces:
            for piece in pieces:
                piece.values.copy_(flat[piece.start:piece.start + piece.values.numel()])
        self._written(kind)
        return True

    def resident(self, states: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the parameter's part of the `states` of the views: moments of its shape, and numbers; empty before a step.

        Moments are views of what rests, where one piece holds the whole parameter.
        """
        found: dict[str, Any] = {}
        pieces: dict[str, list[Tensor]] = {}
        for view in self._views():
            for part in (part for part in view.parts if self.unit.layout.slots[part.slot] is self.slot):
                at = part.offset - view.start
                for kind, value in states.get(view.parameter, {}).items():
                    if isinstance(value, Tensor) and value.dim():
                        pieces.setdefault(kind, []).append(value[at:at + part.stop - part.start])
                    else:
                        found[kind] = value
        for kind, parts in pieces.items():
            found[kind] = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self.slot.shape)
        return found

    def _exists(self, kind: str, *, together: bool = False) -> bool:
        """Finish what is under way, and say whether there is state of this kind. `together`: every rank calls it.

        Raises `UsageError` for the sum of one copy of the state alone, if this rank may be the only one that asks, and where
        backward has stepped the unit.
        """
        self.unit.check_not_stepped()
        if self.unit.pending is not None:
            self.unit.pending.finish()
        self.unit.finish_gather()
        if kind == GRADIENT:
            gradient = self.unit.gradient
            gradient.wait_reduced()
            if together:
                gradient.join_replicas()
            elif gradient.has_sum and not gradient.spans_copies:
                raise UsageError(f"{self.slot.name}: rank {self.unit.communicator.rank} reads or writes its part of a "
                                 f"gradient that is not yet summed over the copies of the state (mics_shard_size); call "
                                 f"engine.allreduce_gradients() on every rank first")
            return gradient.has_sum
        return kind == MASTER or kind in self.kinds()

    def _factor(self, kind: str) -> float:
        return self.optimizer.loss_scale if kind == GRADIENT else 1.0

    @contextmanager
    def _pieces(self, kind: str, *, changed: bool) -> Generator[list[_Piece]]:
        """Yield the elements of the parameter that rest on this rank, fetched within the context."""
        owned = self.unit.master_range
        own = range(max(self.slot.start, owned.start), min(self.slot.stop, owned.stop))
        with ExitStack() as within:
            if not own:
                yield []
            elif kind == MASTER:
                part = fetched(self.unit.state.master, own.start - owned.start, own.stop - owned.start, changed=changed)
                yield [_Piece(start=own.start - self.slot.start, values=within.enter_context(part))]
            elif kind == GRADIENT:
                part = self.unit.gradient.opened(range(own.start - owned.start, own.stop - owned.start), changed=changed)
                yield [_Piece(start=own.start - self.slot.start, values=within.enter_context(part))]
            else:
                yield [piece for view in self._views() for piece in self._moments(view, kind, within, changed=changed)]

    def _views(self) -> Iterator[MasterView]:
        for view in self.optimizer.views.views:
            if view.unit is self.unit and any(self.unit.layout.slots[part.slot] is self.slot for part in view.parts):
                yield view

    def _moments(self, view: MasterView, kind: str, within: ExitStack, *, changed: bool) -> Iterator[_Piece]:
        """Yield the parameter's elements of a moment of one view."""
        inner = self.optimizer.optimizer
        state = inner.state.get(view.parameter)
        if not state:
            blank = blank_state(type(inner), inner.defaults)
            place = view.number_device(inner.param_groups[view.group])
            state = {name: self.unit.state.moment(name, torch.float32)[view.start:view.stop] if value.dim()
                     else value.to(place) for name, value in blank.items()}
            if changed:
                inner.state[view.parameter] = state
        for part in view.parts:
            if self.unit.layout.slots[part.slot] is not self.slot:
                continue
            size = part.stop - part.start
            if kind in self.unit.state.moments:
                moment = fetched(self.unit.state.moments[kind], part.offset, part.offset + size, changed=changed)
                yield _Piece(start=part.start, values=within.enter_context(moment))
            else:
                at = part.offset - view.start
                yield _Piece(start=part.start, values=state[kind][at:at + size])

    def _written(self, kind: str) -> None:
        """Have the weights follow a written master."""
        if kind == MASTER:
            self.unit.cast_master_to_weights()
            self.unit.publish()
            if not self.unit.is_released:
                self.unit.gather()


def _refuse_write(*_: object, **__: object) -> NoReturn:
    raise UsageError(f"optimizer.state[...][...] = ...: {STATE_IS_KEPT}. Keep values of your own in a dict of yours")


class _KeptEntry(dict[str, Any]):
    """The state of one parameter: its tensors may be changed in place, and no value replaced. Copies are plain dicts."""

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = cast("Any", _refuse_write)

    def __setitem__(self, kind: str, value: object) -> None:
        # `state[p]["exp_avg"] *= 0.5` sets the tensor that it has changed. Several parameters share a number, such as "step"
        if not (isinstance(value, Tensor) and value.dim() and self.get(kind) is value):
            _refuse_write()

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, ({**self},)


class _KeptState(Mapping[Tensor, dict[str, Any]]):
    """The optimizer's state by the model's parameters: it can be read and cleared, and no entry or value replaced.

    A parameter without state reads as an empty dict, as in torch.
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return _KeptEntry(self._read(parameter))

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, Tensor) and bool(self._read(parameter))

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        return self[parameter] or default

    def _read(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of `parameter`, empty where there is none."""
        raise NotImplementedError

    def clear(self) -> None:
        """Begin the moments anew."""
        self._optimizer.reset_state()

    def __setitem__(self, parameter: Tensor, value: object) -> NoReturn:
        raise UsageError(f"optimizer.state[...] = ...: {STATE_IS_KEPT}")

    def __delitem__(self, parameter: Tensor) -> NoReturn:
        raise UsageError(f"del optimizer.state[...]: {STATE_IS_KEPT}")


class ReplicatedState(_KeptState):
    """The optimizer's state by the model's parameters, in the order of the groups, where every rank holds all of it."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        super().__init__(optimizer)
        self._states: Mapping[Tensor, Mapping[str, Any]] = ShardedOptimizer.state.__get__(optimizer)  # a subclass may differ

    @staticmethod
    def exists(optimizer: ShardedOptimizer) -> bool:
        """Whether every rank holds all of the state."""
        return not optimizer.shards_state

    def _read(self, parameter: Tensor) -> dict[str, Any]:
        state = ParameterState.of(self._optimizer, parameter) if isinstance(parameter, nn.Parameter) else None
        return {} if state is None else state.resident(self._states)

    def __iter__(self) -> Iterator[Tensor]:
        for parameter in (parameter for group in self._optimizer.param_groups for parameter in group["params"]):
            state = ParameterState.of(self._optimizer, parameter)
            if state is not None and state.resident(self._states):
                yield parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SlicedState(_KeptState):
    """The optimizer's state where ranks hold slices of it: empty before the first step; after it reading raises."""

    def _read(self, parameter: Tensor) -> dict[str, Any]:
        self._refuse_read()
        return {}

    def __iter__(self) -> Iterator[Tensor]:
        self._refuse_read()
        return iter(())

    def __len__(self) -> int:
        self._refuse_read()
        return 0

    def _refuse_read(self) -> None:
        if self._optimizer.optimizer.state:
            raise UsageError("optimizer.state: ranks hold slices of it at stages 1 to 3, and changes here would be lost: "
                             "read it by optimizer.state_dict() on every rank, or a moment by shoal.compat.parameters."
                             "safe_get_full_optimizer_state(param, 'exp_avg'); optimizer.state.clear() begins it anew")
