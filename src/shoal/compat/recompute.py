"""Activation checkpointing as published: a function's activations are dropped after forward and computed again in backward.

The recompute starts from the random state of the forward: the default generators of the host and of the device, and the
named states of the tracker. In between the inputs rest as `Recompute` says: where they are, on the host, or as one slice on
each tensor rank, gathered again for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shoal.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shoal.compat.partitioned_tensor import PartitionedTensor
from shoal.errors import UsageError

__all__ = ["MODEL_PARALLEL_RNG", "CudaRNGStatesTracker", "Recompute", "may_rest"]

MODEL_PARALLEL_RNG = "model-parallel-rng"
"""The name of the random state of slices, which differs between tensor ranks."""


class CudaRNGStatesTracker:
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
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Generator[None]:
        """Within the context the device draws from the state `name`, which advances. Raises `UsageError` if unknown."""
        if name not in self.states_:
            raise UsageError(f"rng tracker: there is no state '{name}'; call add(name, seed) first")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RandomState:
    """The state of all random generators that a function may use."""

    host: Tensor
    device: Tensor | None
    named: Mapping[str, Tensor]

    @classmethod
    def of(cls, tracker: CudaRNGStatesTracker) -> _RandomState:
        on_host = get_accelerator().is_synchronized_device()
        return cls(host=torch.get_rng_state(), device=None if on_host else get_accelerator().get_rng_state(),
                   named=tracker.get_states())

    def restore(self, tracker: CudaRNGStatesTracker) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            get_accelerator().set_rng_state(self.device)
        tracker.set_states({name: state.clone() for name, state in self.named.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """How checkpointed functions are run again."""

    tracker: CudaRNGStatesTracker
    on_host: bool = False
    """Whether the inputs rest on the host until backward."""
    group: dist.ProcessGroup | None = None
    """The tensor ranks of which each keeps one slice of the inputs; None: each keeps them whole."""
    synchronize: bool = False
    """Whether to wait for the device before and after."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`, without keeping its activations."""
        if self.synchronize:
            get_accelerator().synchronize()
        call = _Call(function, args, kwargs)
        result = torch_checkpoint(call, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts)
        if torch.is_grad_enabled() and (self.on_host or self.group is not None):
            call.rest(self._rest)
        if self.synchronize:
            get_accelerator().synchronize()
        return result

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        before = _RandomState.of(self.tracker)
        return _unchanged(), self._replayed(before)

    @contextmanager
    def _replayed(self, before: _RandomState) -> Generator[None]:
        now = _RandomState.of(self.tracker)
        before.restore(self.tracker)
        try:
            yield
        finally:
            now.restore(self.tracker)

    def _rest(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that gives the tensor back; until then it rests as configured."""
        needs = tensor.requires_grad
        value = tensor.detach()
        if self.group is not None and value.numel() >= dist.get_world_size(self.group):
            part = PartitionedTensor(value, self.group)
            if self.on_host:
                part.move("cpu")
            return lambda: part.full().requires_grad_(needs)
        if not self.on_host:
            return lambda: value.requires_grad_(needs)
        host, device = value.to("cpu", copy=True), value.device
        return lambda: host.to(device).requires_grad_(needs)


@contextmanager
def _unchanged() -> Generator[None]:
    yield


class _Call:
    """A call whose inputs may be set to rest after it; they come back when it is made again."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._resting: dict[int, Callable[[], Tensor]] = {}

    def __call__(self) -> Any:
        args = tuple(self._resting[place]() if place in self._resting else value for place, value in enumerate(self._args))
        return self._function(*args, **self._kwargs)

    def rest(self, resting: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        """Set the floating-point inputs to rest, without those that are marked `no_checkpointing`."""
        self._resting = {place: resting(value) for place, value in enumerate(self._args) if may_rest(value)}
        self._args = tuple(None if place in self._resting else value for place, value in enumerate(self._args))


def may_rest(value: Any) -> bool:
    """Whether `value` is an activation that may rest elsewhere: scripts exclude one by its attribute `no_checkpointing`."""
    return isinstance(value, Tensor) and value.is_floating_point() and not getattr(value, "no_checkpointing", False) \
        and not isinstance(value, torch.nn.Parameter)
