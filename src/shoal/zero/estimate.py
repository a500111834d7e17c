"""Estimate the bytes of a model's state before anything is allocated.

`estimate` answers for this library: it asks `placement.state_bytes`, the very function that the engine's own accounts
are held to, so it is exact up to the padding of units to equal spans. Activations, gathered units and communication
buffers come on top: they depend on the batch, not on the stage.

The `estimate_zero*` functions answer in DeepSpeed's published terms (16-bit training with Adam: 2 bytes of weight, 2 of
gradient kept as 4 with the master copy, 12 of master and moments) for scripts that call them by name. With P
parameters, L of them in the largest layer, g ranks a node, n nodes, G = g n and a factor f for other host buffers:

    stage 2, optimizer on the host         device 2 P             host P max(4 G, 16) f
    stage 2, nothing on the host           device 2 P + 18 P / G  host 4 P g f
    stage 3, weights, optimizer on host    device 4 L             host P max(b, 18 / n) f
    stage 3, optimizer on the host         device 4 L + 2 P / G   host P max(b, 16 / n) f
    stage 3, nothing on the host           device 4 L + 18 P / G  host 4 g f (L if built under Init else P)

where b is 0 for a model built under `zero.Init` and 4 g for one that every rank of a node builds whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.zero.placement import STAGES, state_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "Estimate",
    "Estimates",
    "estimate",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]


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
            table.add_row(str(row.ranks), str(row.stage), *map(_size, (*parts, *map(row.on, tiers.values()))))
        return table

    def __str__(self) -> str:
        return _render(self.__rich__())


def estimate(model: nn.Module | int, ranks: int | Iterable[int], *, stages: Sequence[int] = range(len(STAGES)),
             compute: torch.dtype = torch.float32, accumulate: torch.dtype | None = None, moments: int = 2,
             offload_param: str = "none", offload_optimizer: str = "none") -> Estimates:
    """Count the bytes of weights, gradients, master weights and optimizer moments that rest on each rank.

    `model` is a live module (on any device, `meta` included; tied parameters count once, frozen ones as weights alone)
    or a number of trainable parameters. `ranks` is one number of data-parallel ranks or several. `compute` is the dtype
    of the weights, `accumulate` the dtype in which gradients rest (by default `compute`), `moments` the tensors that the
    optimizer keeps per parameter (2 for the Adam family). `offload_param` and `offload_optimizer` name the device where
    weights and the rest rest, as in the configuration; what training holds in memory beside that, `working` estimates.
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
            still = state_bytes(stage, frozen, number, compute=compute).weight
            rows.append(Estimate(stage=stage, ranks=number, weight=state.weight + still, gradient=state.gradient,
                                 master=state.master, moments=state.moments, param_device=offload_param,
                                 optimizer_device=offload_optimizer))
    return Estimates(trainable=trainable, frozen=frozen, compute=compute, rows=tuple(rows))


def _count(model: nn.Module | int) -> tuple[int, int]:
    if isinstance(model, int):
        if model < 0:
            raise UsageError(f"estimate: model: got {model} parameters; a count is 0 or more")
        return model, 0
    parameters = list(model.parameters())
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return trainable, sum(parameter.numel() for parameter in parameters) - trainable


def estimate_zero2_model_states_mem_needs(total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                          cpu_offload: bool = True,
                                          additional_buffer_factor: float = 1.5) -> tuple[int, int]:
    """Return DeepSpeed's estimate for stage 2 as bytes (of a node's host memory, of one device's memory)."""
    ranks = num_gpus_per_node * num_nodes
    if cpu_offload:
        return int(total_params * max(4 * ranks, 16) * additional_buffer_factor), 2 * total_params
    host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), 2 * total_params + 18 * total_params // ranks


def estimate_zero3_model_states_mem_needs(total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1,
                                          num_nodes: int = 1, cpu_offload: bool = True,
                                          cpu_offload_params: bool = True, zero_init: bool = True,
                                          additional_buffer_factor: float = 1.5) -> tuple[int, int, int]:
    """Return DeepSpeed's estimate for stage 3 as bytes (of a node's host memory, of one device's, of the largest layer).

    Weights move to the host only together with the optimizer: `cpu_offload_params` counts where `cpu_offload` is set.
    """
    ranks = num_gpus_per_node * num_nodes
    largest = 4 * largest_layer_params
    if not cpu_offload:
        built = largest_layer_params if zero_init else total_params
        host = built * 4 * num_gpus_per_node * additional_buffer_factor
        return int(host), largest + 18 * total_params // ranks, largest
    whole = 0 if zero_init else 4 * num_gpus_per_node
    kept, device = (18, 0) if cpu_offload_params else (16, 2 * total_params // ranks)
    return int(total_params * max(whole, kept / num_nodes) * additional_buffer_factor), largest + device, largest


def estimate_zero2_model_states_mem_needs_all_live(model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                                   additional_buffer_factor: float = 1.5) -> None:
    """Print DeepSpeed's stage 2 estimates of `model` for every choice of offload."""
    estimate_zero2_model_states_mem_needs_all_cold(sum(_count(model)), num_gpus_per_node, num_nodes,
                                                   additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                                   additional_buffer_factor: float = 1.5) -> None:
    """Print DeepSpeed's stage 2 estimates of a model of `total_params` parameters for every choice of offload."""
    rows: list[tuple[int, int, str]] = []
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(total_params, num_gpus_per_node, num_nodes, offload,
                                                             additional_buffer_factor)
        rows.append((host, device, f"offload_optimizer={_tier(offload)}"))
    _print_offers(f"stage 2: {total_params:,} parameters", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                                   additional_buffer_factor: float = 1.5) -> None:
    """Print DeepSpeed's stage 3 estimates of `model` for every choice of offload and of `zero.Init`."""
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    estimate_zero3_model_states_mem_needs_all_cold(sum(_count(model)), largest, num_gpus_per_node, num_nodes,
                                                   additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(total_params: int, largest_layer_params: int,
                                                   num_gpus_per_node: int = 1, num_nodes: int = 1,
                                                   additional_buffer_factor: float = 1.5) -> None:
    """Print DeepSpeed's stage 3 estimates of a model of `total_params` for every choice of offload and `zero.Init`.

    `largest_layer_params` counts the parameters that the largest single layer holds itself.
    """
    rows: list[tuple[int, int, str]] = []
    for optimizer, weights in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, optimizer, weights, init,
                additional_buffer_factor)
            rows.append((host, device, f"offload_param={_tier(weights)}, offload_optimizer={_tier(optimizer)}, "
                                       f"zero_init={int(init)}"))
    title = f"stage 3: {total_params:,} parameters, {largest_layer_params:,} in the largest layer"
    _print_offers(title, num_gpus_per_node, num_nodes, rows)


def _print_offers(title: str, ranks_per_node: int, nodes: int, rows: list[tuple[int, int, str]]) -> None:
    from rich.table import Table

    table = Table("host, per node", "per device", "options", title=f"{title}; {nodes} x {ranks_per_node} ranks",
                  title_justify="left")
    for host, device, options in rows:
        table.add_row(_size(host), _size(device), options)
    print(_render(table))


def _render(table: Table) -> str:
    from rich.console import Console

    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def _tier(offload: bool) -> str:
    return "cpu" if offload else "none"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
