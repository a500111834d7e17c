"""Random numbers over a tensor axis: equal on all ranks for whole tensors, different on each rank for slices.

Whole tensors use the default generators, which `align` gives the same state on every rank of a tensor axis. Slices use a
stream of their own on each rank: `Apart.fork` lends it the default generators, seeded from (the next draw of the host's
default generator, the axis' seed, the rank). Restoring the default generators (recompute, a checkpoint, a resumed run)
therefore restores these streams too, which have no state of their own.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.device import current_device, is_initialized, manual_seed, on_accelerator, rng_state, set_rng_state
from shoal.transport.collectives import Communicator

__all__ = ["Apart", "RankLocalRng", "align"]

_WORD = (1 << 32) - 1


class Apart:
    """A random stream for each rank of an axis. Axes with different `seed` have different streams."""

    def __init__(self, rank: int, seed: int = 0):
        self.rank = rank
        self.seed = seed

    def state_dict(self) -> dict[str, int]:
        """Return the state that a checkpoint needs beside the state of the default generators."""
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the seed that `state_dict` gave; the rank stays this rank's own."""
        self.seed = state["seed"]

    @contextmanager
    def fork(self, device: torch.device | None = None) -> Generator[None]:
        """Within the context the default generators of the host and of `device` (with its index) draw this rank's stream.

        Afterwards the host's default generator has advanced by one draw, on every rank.
        """
        host = torch.default_generator
        seed = _mixed(int(torch.randint(1 << 31, (), generator=host, device="cpu")), self.seed, self.rank)
        accelerator = device if device is not None and on_accelerator(device) else None
        host_state = host.get_state()
        state = None if accelerator is None else rng_state(accelerator)
        try:
            host.manual_seed(seed)
            if accelerator is not None:
                manual_seed(accelerator, seed)
            yield
        finally:
            host.set_state(host_state)
            if accelerator is not None and state is not None:
                set_rng_state(accelerator, state)


def align(group: dist.ProcessGroup, *, timeout: float = 600.0) -> None:
    """Copy the first rank's state of the host's default generator to every rank; accelerators are seeded from it."""
    communicator = Communicator(group, timeout=timeout)
    buffer = torch.get_rng_state().to(communicator.words_device)
    communicator.broadcast(buffer, 0, "random state")
    torch.set_rng_state(buffer.cpu())
    if on_accelerator(device := current_device()) and is_initialized(device):
        manual_seed(device, torch.initial_seed())


@dataclass(slots=True)
class RankLocalRng:
    """Forward hooks: a module draws from this rank's stream in training, until a row layer makes its values whole again."""

    apart: Apart
    _open: ExitStack = field(default_factory=ExitStack)

    def attach(self, module: nn.Module) -> None:
        """Fork the generators at each call of the module, and restore them after it, also if it raises."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self.leave, always_call=True)

    def leave(self, *_: object) -> None:
        """Restore the generators, if they are forked."""
        self._open.close()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            self._open.enter_context(self.apart.fork(device))


def _mixed(*words: int) -> int:
    """Mix integers into 32 bits, each of which depends on all of their bits (the finalizer of MurmurHash3)."""
    mixed = 0
    for word in words:
        mixed = (mixed * 0x9E3779B1 + (word & _WORD) + 1) & _WORD
        mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _WORD
        mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _WORD
        mixed ^= mixed >> 16
    return mixed
