"""Random numbers over a tensor axis: the same on all ranks where tensors are whole, others on each where they are parts.

The default generators are the first kind: every rank of a tensor axis seeds them alike (`align` sees to it) and draws from
them alike. Within `Apart.fork` the default generators are lent to a stream of their own on each rank, whose seed is a
function of (what the host's default generator gives next, the axis' seed, the rank). So whatever brings the default
generators back brings these streams back as well, with no state of their own: recompute, a checkpoint, a resumed run.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from shoal.transport.collectives import Communicator

__all__ = ["Apart", "align"]

_WORD = (1 << 32) - 1


class Apart:
    """Random numbers that differ over the ranks of one axis. `seed` tells the streams of several axes from each other."""

    def __init__(self, rank: int, seed: int = 0):
        self.rank = rank
        self.seed = seed

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint needs beside the state of the default generators."""
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the seed that `state_dict` gave; the rank stays this one's."""
        self.seed = state["seed"]

    @contextmanager
    def fork(self, device: torch.device | None = None) -> Generator[None]:
        """Lend the default generators of the host and of `device` (with its index) to this rank's stream.

        Outside, the host's default generator has moved on by one draw, on every rank alike.
        """
        host = torch.default_generator
        seed = _mixed(int(torch.randint(1 << 31, (), generator=host)), self.seed, self.rank)
        generators = [host] if device is None or device.type == "cpu" else [host, _generator(device)]
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def align(group: dist.ProcessGroup, *, timeout: float = 600.0) -> None:
    """Give the host's default generator of every rank the state of the first rank's; accelerators are seeded from it."""
    communicator = Communicator(group, timeout=timeout)
    state = torch.get_rng_state()
    buffer = state.cuda() if communicator.native else state
    communicator.broadcast(buffer, 0, "random state")
    torch.set_rng_state(buffer.cpu())
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(torch.initial_seed())


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index]


def _mixed(*words: int) -> int:
    """Mix words to 32 bits, each bit of which depends on all of theirs (the finalizer of MurmurHash3)."""
    mixed = 0
    for word in words:
        mixed = (mixed * 0x9E3779B1 + (word & _WORD) + 1) & _WORD
        mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _WORD
        mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _WORD
        mixed ^= mixed >> 16
    return mixed
