"""Checks of parameters while an engine trains: those that were frozen when it was built, and those that every tensor rank
holds whole, whose gradients must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shoal.errors import RanksDisagree, UsageError
from shoal.transport.collectives import Communicator
from shoal.zero.unit import Unit

__all__ = ["FrozenParamCheck", "ReplicatedGradCheck"]

# Frozen parameters

_SHOWN = 3


class FrozenParamCheck:
    """Refuses to train parameters that were frozen when the engine was built: they have no gradient or optimizer state.

    Freezing a parameter during training is allowed: it has no gradient from then on, the optimizer skips it like an unused
    one, and its state is kept for when it is trained again.
    """

    def __init__(self, units: Iterable[Unit]):
        self._parameters: Mapping[str, nn.Parameter] = {
            member.name: member.parameter for unit in units for member in unit.members if not member.parameter.requires_grad}

    def check(self, rank: int) -> None:
        """Raise `UsageError` if one of the parameters requires gradients by now."""
        thawed = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        if thawed:
            more = f" and {len(thawed) - _SHOWN} more" if len(thawed) > _SHOWN else ""
            raise UsageError(
                f"rank {rank}: backward: {', '.join(thawed[:_SHOWN])}{more} required no gradient at initialize: "
                f"there is no state to train it by. Call requires_grad_(False) after initialize, which can be undone at any "
                f"step; or save a checkpoint, and load it into an engine of the model as it is now")


# Replicated gradients

_CHUNKS = 8
_TOLERANCE = 0.01
"""Parts of a gradient's norm by which the sums of its chunks may differ: rounding is far below, other data far above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GradSummary:
    """The norm and the chunk sums of a parameter's gradient; those of several microbatches add up."""

    norm: float
    sums: tuple[float, ...]

    @classmethod
    def of(cls, gradient: Tensor) -> _GradSummary:
        values = gradient.detach().reshape(-1).float()
        return cls(norm=values.norm().item(), sums=tuple(chunk.sum().item() for chunk in values.chunk(_CHUNKS)))

    def __add__(self, other: _GradSummary) -> _GradSummary:
        return _GradSummary(norm=self.norm + other.norm, sums=tuple(map(sum, zip(self.sums, other.sums, strict=True))))

    def matches(self, other: _GradSummary) -> bool:
        """Whether both may describe one gradient."""
        limit = _TOLERANCE * max(self.norm, other.norm)
        return not any(abs(one - two) > limit for one, two in zip(self.sums, other.sums, strict=True))


class ReplicatedGradCheck:
    """Compares, at the first step, the gradients of parameters that every tensor rank holds whole.

    Tensor ranks compute the same on such parameters, and their gradients are averaged like those of data ranks. A norm that
    runs on one rank's part of the sequence, and that no plan names, has another addend on each rank instead. Training by
    their mean would divide its gradient by the number of ranks, without a sign in the loss. The same holds for layers that
    draw random numbers of each rank's own.
    """

    def __init__(self, units: Iterable[Unit]):
        self._summaries: dict[str, _GradSummary] = {}
        self._handles = [member.parameter.register_hook(partial(self._record, member.name)) for unit in units
                         if unit.replica_group.tensor_replicated for member in unit.members
                         if member.parameter.requires_grad]

    def compare(self, tensor_ranks: Communicator, *, keep_checking: bool = False) -> bool:
        """Return whether to compare again: if `keep_checking`, or if gradients overflowed, which proves nothing.

        Raises `RanksDisagree`, on all tensor ranks, where copies have other gradients.
        """
        by_rank = tensor_ranks.gather_objects(self._summaries)
        self._summaries = {}
        for rank, summaries in enumerate(by_rank):
            for name, summary in summaries.items():
                if name in by_rank[0] and not summary.matches(by_rank[0][name]):
                    raise RanksDisagree(
                        f"'{name}' is whole on all tensor ranks, and has another gradient on rank {rank} of them than on "
                        f"rank 0 (norms {summary.norm:g} and {by_rank[0][name].norm:g}): if it runs on a part of the "
                        f"sequence, say Norm() of its module in the plan; if it is cut, mark it; if it draws random "
                        f"numbers, let all tensor ranks draw the same")
        finite = all(math.isfinite(summary.norm) for summaries in by_rank for summary in summaries.values())
        if finite and not keep_checking:
            self.remove()
        return keep_checking or not finite

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _record(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None and gradient.layout == torch.strided:  # None where backward is split in two
            summary = _GradSummary.of(gradient)
            self._summaries[name] = self._summaries[name] + summary if name in self._summaries else summary
