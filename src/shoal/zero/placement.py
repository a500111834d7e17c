"""A ZeRO stage is a row of one table: where the weight, the gradient and the optimizer's state rest between uses.

    REPLICATE   every rank holds the value
    PARTIAL     every rank holds one addend of the value
    SHARD       every rank holds one slice of the value

A training step is four redistributions, each a no-op where the source already rests as asked:

    before compute   weight   -> REPLICATE         all-gather
    after backward   gradient -> stage.gradient    reduce-scatter
    before step      gradient -> stage.master      reduce-scatter / all-reduce
    after step       master   -> stage.weight      all-gather

Source of the stages: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from shoal.transport.reduction import wide_dtype


class Placement(Enum):
    """Where the value of a tensor rests over the ranks of a data axis."""

    REPLICATE = "every rank holds the value"
    PARTIAL = "every rank holds one addend of the value"
    SHARD = "every rank holds one slice of the value"


REPLICATE, PARTIAL, SHARD = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the model state rests between uses."""

    weight: Placement = REPLICATE
    gradient: Placement = PARTIAL
    master: Placement = REPLICATE
    """The fp32 copy of the weights and the optimizer's moments, which always rest together."""

    def __post_init__(self) -> None:
        """A step reads the gradient, and writes the weights, of the slice whose master it has."""
        assert PARTIAL not in (self.weight, self.master), f"{self}: only gradients are sums of addends"
        assert self.gradient is not REPLICATE, f"{self}: a gradient rests as addends, or as parts of their sum"
        assert self.shards_state or not (self.shards_weights or self.shards_gradients), \
            f"{self}: weights or gradients are sharded only where masters are"

    @property
    def shards_weights(self) -> bool:
        """Whether a rank holds only a part of the weights between their uses, or none."""
        return self.weight is not REPLICATE

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank holds only a part of the summed gradients, or none, between backward passes."""
        return self.gradient is not PARTIAL

    @property
    def shards_state(self) -> bool:
        """Whether a rank holds, and steps, only a part of the masters and moments, or none."""
        return self.master is not REPLICATE

    @property
    def publishes(self) -> bool:
        """Whether a step ends by sending weights: they rest elsewhere than the masters that it has stepped."""
        return self.weight is not self.master

    @property
    def persistent(self) -> Stage:
        """The row of parameters whose weights stay whole although those of others are sharded."""
        return replace(self, weight=REPLICATE) if self.shards_weights else self


STAGES = (
    Stage(),
    Stage(master=SHARD),
    Stage(master=SHARD, gradient=SHARD),
    Stage(master=SHARD, gradient=SHARD, weight=SHARD),
)
"""ZeRO stages 0 to 3: each shards one thing more."""
COMPRESSED = STAGES[1]
"""The row of training with compressed communication, whichever of stages 0 to 2 is asked for: the compression error rests in
the PARTIAL gradient."""


def effective_row(row: Stage, ranks: int) -> Stage:
    """Return the row in effect over so many ranks: one rank's addend is the sum, which needs no other place to rest."""
    return replace(row, gradient=PARTIAL) if ranks == 1 else row


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of model state that rest on one rank."""

    weight: int
    gradient: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        return self.weight + self.gradient + self.master + self.moments


def master_dtype(compute: torch.dtype) -> torch.dtype:
    """The dtype of the copy that the optimizer steps: fp32, or wider where the weights are."""
    return wide_dtype(compute)


def state_bytes(stage: int, parameters: int, ranks: int, *, compute: torch.dtype,
                accumulate: torch.dtype | None = None, moments: int = 2) -> StateBytes:
    """Return the bytes per rank that `parameters` trainable parameters take at `stage` on `ranks` ranks.

    `compute` is the dtype of the weights, `accumulate` that of the gradient at rest (default: `compute`), `moments` how
    many tensors the optimizer keeps per parameter (Adam: 2). Weights that have the master's dtype are their own master.
    Source of the formula: ZeRO, section 3.1 and table 1; padding of a unit to equal shards is not counted.
    """
    row = STAGES[stage]
    accumulate = accumulate or compute
    wide = master_dtype(compute)

    def rests(placement: Placement, size: int) -> int:
        return parameters * size // (1 if placement in (REPLICATE, PARTIAL) else ranks)

    return StateBytes(
        weight=rests(row.weight, compute.itemsize),
        gradient=rests(row.gradient, accumulate.itemsize),
        master=0 if compute == wide else rests(row.master, wide.itemsize),
        moments=moments * rests(row.master, wide.itemsize),
    )
