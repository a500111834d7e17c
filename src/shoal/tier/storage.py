"""Which tier the state of each unit rests in: a choice of two stores, and how much of it stays nearer all the same."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shoal.tier.lanes import Lanes
from shoal.tier.store import Disk, Memory, Store
from shoal.tier.swap import Swap
from shoal.tier.trace import Trace

__all__ = ["StoragePlan", "Tiers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Where the weights of a unit rest, and where its masters, moments and reduced gradient do."""

    weight: Store
    state: Store


@dataclass(slots=True, kw_only=True)
class StoragePlan:
    """The stores of weights and of the optimizer's state, handed out to the units in their order."""

    device: torch.device
    """The compute device."""
    weight: Store
    state: Store
    ratio: float = 1.0
    """The share of the elements whose optimizer's state rests in `state`; the others' stays on the compute device."""
    near: int = 0
    """Elements of weights that stay in the host's memory where `weight` is a disk."""
    lanes: Lanes = field(default_factory=Lanes)
    _seen: int = field(default=0, init=False)
    _away: int = field(default=0, init=False)
    _kept: int = field(default=0, init=False)

    def tiers(self, weights: int, states: int) -> Tiers:
        """Return the stores of the next unit, of so many elements of weights and of optimizer's state."""
        weight, state = self.weight, self.state
        if weight.granule is not None and self._kept + weights <= self.near:
            self._kept += weights
            weight = Memory(device=torch.device("cpu"), pinned=self.device.type != "cpu")
        self._seen += states
        if self._away + states <= self.ratio * self._seen:
            self._away += states
        else:
            state = Memory(device=self.device)
        return Tiers(weight=weight, state=state)

    @property
    def swaps(self) -> list[Swap]:
        """The swap files that the state rests in."""
        return list({id(store.swap): store.swap for store in (self.weight, self.state) if isinstance(store, Disk)}.values())

    @contextmanager
    def trace(self) -> Generator[Trace]:
        """Record what is done within the context: computing, waiting, reading and writing."""
        trace = Trace()
        listeners = [self.lanes, *self.swaps]
        for listener in listeners:
            listener.trace = trace
        try:
            yield trace
        finally:
            for listener in listeners:
                listener.trace = None

    def close(self) -> None:
        """Remove the swap files that nothing rests in any more."""
        for swap in self.swaps:
            if swap.disk_bytes == 0:
                swap.close()
