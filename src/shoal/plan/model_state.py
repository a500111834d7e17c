"""Estimate the bytes of a model's state before anything is allocated.

`estimate` calls `placement.state_bytes`, which the engine's own accounts are tested against, so it is exact up to the
padding of units to equal spans. Gathered units and buffers come on top (`working_memory.py`), and activations, which depend
on the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from shoal.config.sizes import format_bytes
from shoal.errors import UsageError
from shoal.zero.placement import STAGES, state_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Estimate", "Estimates", "estimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes of model state that rest on one rank at one stage."""

    stage: int
    ranks: int
    weight: int
    gradient: int
    master: int
    moments: int
    param_device: str = "none"
    """Where weights rest: none (the compute device), cpu or nvme."""
    optimizer_device: str = "none"
    """Where gradients, masters and moments rest."""

    @property
    def total(self) -> int:
        return self.weight + self.gradient + self.master + self.moments

    def on(self, device: str) -> int:
        """Return the bytes that rest on `device`: none, cpu or nvme."""
        state = self.gradient + self.master + self.moments
        return self.weight * (self.param_device == device) + state * (self.optimizer_device == device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Estimates of one model, a row for each (ranks, stage); prints as a table (`rich.print` or `str`)."""

    trainable: int
    frozen: int
    compute: torch.dtype
    rows: tuple[Estimate, ...]

    def __rich__(self) -> Table:
        from rich.table import Table

        frozen = f" + {self.frozen:,} frozen" if self.frozen else ""
        table = Table(title=f"Model state per rank: {self.trainable:,} parameters{frozen}, {_name(self.compute)}")
        away = any(row.on("none") < row.total for row in self.rows)
        tiers = {"device": "none", "host": "cpu", "disk": "nvme"} if away else {}
        for column in ("ranks", "stage", "weight", "gradient", "master", "moments", "total", *tiers):
            table.add_column(column, justify="right")
        for row in self.rows:
            if table.rows and row.stage == self.rows[0].stage:
                table.add_section()
            parts = (row.weight, row.gradient, row.master, row.moments, row.total)
            table.add_row(str(row.ranks), str(row.stage), *map(format_bytes, (*parts, *map(row.on, tiers.values()))))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=110, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")


def estimate(model: nn.Module | int, ranks: int | Iterable[int], *, stages: Sequence[int] = range(len(STAGES)),
             compute: torch.dtype = torch.float32, accumulate: torch.dtype | None = None, moments: int = 2,
             offload_param: str = "none", offload_optimizer: str = "none") -> Estimates:
    """Count the bytes of weights, gradients, master weights and optimizer moments that rest on each rank.

    `model` is a live module (on any device, `meta` included; tied parameters count once, frozen ones as weights alone)
    or a number of trainable parameters. `ranks` is one number of data-parallel ranks or several. `compute` is the dtype
    of the weights, `accumulate` the dtype in which gradients rest (by default `compute`), `moments` the tensors that the
    optimizer keeps per parameter (2 for the Adam family). `offload_param` and `offload_optimizer` name the device where
    weights and the rest rest, as in the configuration. `estimate_working_memory` tells what training holds beside that.
    Formula: `shoal.zero.placement.state_bytes`.

    Raises `UsageError` for a count, a stage or a device that cannot be.
    """
    trainable, frozen = _count(model)
    every = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if not every or min(every) < 1:
        raise UsageError(f"estimate: ranks: got {ranks!r}; give one or more numbers of at least 1")
    unknown = [stage for stage in stages if stage not in range(len(STAGES))]
    if unknown:
        raise UsageError(f"estimate: stages: got {unknown[0]!r}; choose from {', '.join(map(str, range(len(STAGES))))}")
    for name, device in (("offload_param", offload_param), ("offload_optimizer", offload_optimizer)):
        if device not in ("none", "cpu", "nvme"):
            raise UsageError(f"estimate: {name}: got {device!r}; choose 'none', 'cpu' or 'nvme'")
    rows: list[Estimate] = []
    for number in every:
        for stage in stages:
            state = state_bytes(stage, trainable, number, compute=compute, accumulate=accumulate, moments=moments)
            frozen_weight = state_bytes(stage, frozen, number, compute=compute).weight
            rows.append(Estimate(stage=stage, ranks=number, weight=state.weight + frozen_weight,
                                 gradient=state.gradient, master=state.master, moments=state.moments,
                                 param_device=offload_param, optimizer_device=offload_optimizer))
    return Estimates(trainable=trainable, frozen=frozen, compute=compute, rows=tuple(rows))


def _count(model: nn.Module | int) -> tuple[int, int]:
    if isinstance(model, int):
        if model < 0:
            raise UsageError(f"estimate: model: got {model} parameters; a count is 0 or more")
        return model, 0
    parameters = list(model.parameters())
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return trainable, sum(parameter.numel() for parameter in parameters) - trainable


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
