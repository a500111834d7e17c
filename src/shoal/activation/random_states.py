"""Named random states, and the state of all generators that a recomputed function draws from.

The recompute of a function begins with the states of its forward: the default generators of the host and of the device, the
named ones, and those of Python's `random` and of `numpy.random`. Afterwards all are as they were before it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from shoal.device import current_device, manual_seed, on_accelerator, rng_state, set_rng_state
from shoal.errors import UsageError

__all__ = ["MODEL_PARALLEL", "TRACKER", "AllStates", "RandomStates", "ReenteredContext", "seed_device"]

MODEL_PARALLEL = "model-parallel-rng"
"""The name of the random state of slices, which differs between tensor ranks."""


class RandomStates:
    """Named random states of the device; `fork` lends one to the device's default generator."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return the states by name, as copies."""
        return {name: state.clone() for name, state in self.states_.items()}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace all states."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state that `seed` gives. Raises `UsageError` for a name or a seed that is there."""
        if seed in self.seeds_:
            raise UsageError(f"rng tracker: seed {seed} belongs to another state; give another one, or call reset()")
        if name in self.states_:
            raise UsageError(f"rng tracker: there is a state '{name}' already; give another name, or call reset()")
        self.seeds_.add(seed)
        before = _state()
        seed_device(seed)
        self.states_[name] = _state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Generator[None]:
        """Within the context the device draws from the state `name`, which advances. Raises `UsageError` if unknown."""
        if name not in self.states_:
            raise UsageError(f"rng tracker: there is no state '{name}'; call add(name, seed) first")
        before = _state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set_state(before)


TRACKER = RandomStates()
"""The named states of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllStates:
    """The states of the host, of the device (the host's own where that is the device), of the names, and of the others."""

    host: Tensor
    device: Tensor
    named: Mapping[str, Tensor]
    python: tuple[Any, ...]
    numpy: dict[str, Any] | tuple[Any, ...]

    @classmethod
    def of(cls, tracker: RandomStates) -> AllStates:
        """Return the present states."""
        return cls(host=torch.get_rng_state(), device=_state(), named=tracker.get_states(), python=random.getstate(),
                   numpy=numpy.random.get_state())

    @contextmanager
    def replayed(self, tracker: RandomStates) -> Generator[None]:
        """Begin with these states, and go back to those before the context."""
        before = AllStates.of(tracker)
        self._restore(tracker)
        try:
            yield
        finally:
            before._restore(tracker)

    def _restore(self, tracker: RandomStates) -> None:
        torch.set_rng_state(self.host)
        _set_state(self.device)
        tracker.set_states({name: state.clone() for name, state in self.named.items()})
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)


class ReenteredContext(AbstractContextManager[None]):
    """A context that can be entered again: each backward of a kept graph recomputes, and torch enters the same object.

    `begin` returns the context for one recompute.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[Any]]):
        self._begin = begin
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        context = self._begin()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def seed_device(seed: int) -> None:
    """Seed the default generator of the device that computes."""
    device = current_device()
    if on_accelerator(device):
        manual_seed(device, seed)
    else:
        torch.manual_seed(seed)


def _state() -> Tensor:
    device = current_device()
    return rng_state(device) if on_accelerator(device) else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    device = current_device()
    if on_accelerator(device):
        set_rng_state(device, state)
    else:
        torch.set_rng_state(state)
