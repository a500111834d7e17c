"""A parameter that every tensor rank holds whole has one gradient there: the first step shows whether it does.

Copies on tensor ranks compute the same, so their gradients are averaged like those of data ranks. A norm that runs on this
rank's part of the sequence, and that no plan speaks of, has another addend on each rank instead, and would be trained on
their mean: too small by the number of ranks, without a sign in the loss. So would what draws random numbers of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shoal.errors import RanksDisagree
from shoal.transport.collectives import Communicator

__all__ = ["ReplicatedGradCheck"]

_CHUNKS = 8
_APART = 0.01
"""Parts of a gradient's norm by which the sums of its chunks may differ: rounding is far below, other data far above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What stands for the gradients of a parameter: those of several microbatches add up."""

    norm: float
    sums: tuple[float, ...]

    @classmethod
    def of(cls, gradient: Tensor) -> _Seen:
        values = gradient.detach().reshape(-1).float()
        return cls(norm=values.norm().item(), sums=tuple(chunk.sum().item() for chunk in values.chunk(_CHUNKS)))

    def __add__(self, other: _Seen) -> _Seen:
        return _Seen(norm=self.norm + other.norm, sums=tuple(map(sum, zip(self.sums, other.sums, strict=True))))

    def is_like(self, other: _Seen) -> bool:
        """Whether both may stand for one gradient."""
        limit = _APART * max(self.norm, other.norm)
        return not any(abs(one - two) > limit for one, two in zip(self.sums, other.sums, strict=True))


class ReplicatedGradCheck:
    """The gradients of the parameters, by name, of which every tensor rank has a copy; looked at until they are compared."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self._seen: dict[str, _Seen] = {}
        self._handles = [parameter.register_hook(partial(self._came, name)) for name, parameter in parameters.items()
                         if parameter.requires_grad]

    def compare(self, tensor_ranks: Communicator, *, again: bool = False) -> bool:
        """Return whether to look again: if that is asked for, or gradients overflowed, which says nothing.

        Raises `RanksDisagree`, on all tensor ranks, where copies have other gradients.
        """
        said = tensor_ranks.gather_objects(self._seen)
        self._seen = {}
        for rank, theirs in enumerate(said):
            for name, seen in theirs.items():
                if name in said[0] and not seen.is_like(said[0][name]):
                    raise RanksDisagree(
                        f"'{name}' is whole on all tensor ranks, and has another gradient on rank {rank} of them than on "
                        f"rank 0 (norms {seen.norm:g} and {said[0][name].norm:g}): if it runs on a part of the sequence, "
                        f"say Norm() of its module in the plan; if it is cut, mark it; if it draws random numbers, let all "
                        f"tensor ranks draw the same")
        again = again or not all(math.isfinite(seen.norm) for theirs in said for seen in theirs.values())
        if not again:
            self.forget()
        return again

    def forget(self) -> None:
        """Look no more."""
        while self._handles:
            self._handles.pop().remove()

    def _came(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None and gradient.layout == torch.strided:  # none is there yet where backward is in halves
            seen = _Seen.of(gradient)
            self._seen[name] = self._seen[name] + seen if name in self._seen else seen
