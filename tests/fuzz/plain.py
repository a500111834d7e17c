"""The reference: the training of a composition by plain PyTorch in one process, with fp32 masters where it is in 16 bits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal import optim
from shoal.optim.onebit import OneBitAdam, ZeroOneAdam
from shoal.optim.onebit_lamb import OneBitLamb

from .draw import Composition, JobDraw
from .model import groups, line, loss_of, microbatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 128.0
"""The static loss scale of fp16."""
OWN: dict[str, type[torch.optim.Optimizer]] = {
    "Lion": optim.Lion, "Lamb": optim.Lamb, "OneBitAdam": OneBitAdam, "ZeroOneAdam": ZeroOneAdam, "OneBitLamb": OneBitLamb}
SMALL = 1e-6
"""Clipping adds it to the norm, as torch.nn.utils.clip_grad_norm_ does."""


@dataclass(slots=True, kw_only=True)
class Trained:
    """The results of the training on one topology."""

    losses: list[float]
    """The mean over all microbatches of each step."""
    norms: list[float | None]
    """The gradient norm of each step, before clipping; None where the engine did not measure it."""
    start: dict[str, Tensor]
    """The weights before the first step in fp32: the masters."""
    end: dict[str, Tensor]


def train(composition: Composition) -> list[Trained]:
    """Return what training gives on the first topology, and from there on the second."""
    masters = line(composition.model)
    optimizer = optimizer_of(composition, masters)
    schedule = schedule_of(composition, optimizer)
    found: list[Trained] = []
    for number, job in enumerate((composition.first, composition.second)):
        _round_frozen(masters, DTYPES[job.dtype])
        start, losses, norms = state_of(masters), list[float](), list[float | None]()
        for step in range(composition.steps):
            loss, norm = _accumulate(composition, job, number * composition.steps + step, masters)
            losses.append(loss)
            norms.append(norm)
            if composition.clipping > 0:
                coefficient = min(1.0, composition.clipping / (norm + SMALL))
                for parameter in masters.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(coefficient)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        found.append(Trained(losses=losses, norms=norms, start=start, end=state_of(masters)))
    return found


def optimizer_of(composition: Composition, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer over a whole model."""
    given = groups(model) if composition.groups else [p for p in model.parameters() if p.requires_grad]
    return build_optimizer(composition, given)


def build_optimizer(composition: Composition, parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer over parameters or groups."""
    name = composition.optimizer
    return (OWN[name] if name in OWN else getattr(torch.optim, name))(parameters, **composition.arguments)


def schedule_of(composition: Composition, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return the schedule of the learning rate."""
    return None if composition.decay is None else torch.optim.lr_scheduler.ExponentialLR(optimizer, composition.decay)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the weights in fp32, under all names."""
    return {name: value.detach().float().clone() for name, value in model.state_dict().items()}


def _round_frozen(masters: nn.Module, dtype: torch.dtype) -> None:
    """Round what is not trained, as it has no master."""
    for parameter in masters.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype).float()


def _accumulate(composition: Composition, job: JobDraw, step: int, masters: nn.Module) -> tuple[float, float]:
    """Give the masters the mean gradient of all microbatches of a step; return the mean loss and the gradient's norm."""
    model = copy.deepcopy(masters).to(DTYPES[job.dtype])
    scale = LOSS_SCALE if job.dtype == "fp16" else 1.0
    pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
    total = 0.0
    for rank in range(job.data):
        for number in range(job.accumulation):
            inputs, labels = microbatch(composition.model, composition.micro, step, rank, number)
            loss = loss_of(model(inputs), labels)
            (loss * (scale / job.accumulation)).backward()
            total += loss.item()
            for parameter, master in pairs:
                if parameter.grad is not None:
                    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    gradient = gradient.float() / (scale * job.data)
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    parameter.grad = None
    norm = torch.nn.utils.get_total_norm([p.grad for p in masters.parameters() if p.grad is not None])
    return total / job.microbatches, norm.item()
