"""How long each layer takes: its forward and backward, measured on one microbatch by one rank, one layer at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import RanksDisagree, UsageError
from shoal.pipeline.layer import Built, Contents, Layer, generators
from shoal.pipeline.value_tree import Skeleton, flatten_tree
from shoal.transport import process_group
from shoal.transport.collectives import Communicator

__all__ = ["measured"]

_ROUNDS = 4  # times that a layer is run; the fastest counts
_PATIENCE = 3600.0  # seconds for the whole model to be built and run, layer by layer


def measured(layers: Sequence[Layer], contents: Sequence[Contents], sample: Any,
             loss_fn: Callable[..., Any] | None) -> list[float]:
    """Return the seconds of each layer, the same on every rank: rank 0 measures. A collective.

    `sample` is one microbatch, (inputs, labels). The loss belongs to the last layer. Recompute is left out: it adds to each
    layer in the same proportion. Layers of one class with as many parameters count as equal, by their median. Raises
    `UsageError`, on every rank, where a layer fails.
    """
    group = dist.group.WORLD
    assert group is not None
    found: list[float] = []
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            with torch.random.fork_rng(devices=generators()):
                found = _measure(layers, sample, loss_fn, process_group.device())
        except Exception as error:  # told to the other ranks, which wait
            failure = error
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    names = [f"{layer} of {held.parameters} parameters" for layer, held in zip(layers, contents, strict=True)]
    everyone = Communicator(group, timeout=_PATIENCE).gather_objects((found, said, names))
    times, problem, first = everyone[0]
    for rank, (_, _, theirs) in enumerate(everyone):
        for index, (mine, other) in enumerate(zip_longest(first, theirs, fillvalue="none")):
            if mine != other:
                raise RanksDisagree(f"PipelineModule: ranks differ in layer {index}: rank 0 has {mine}, rank {rank} has "
                                    f"{other}; give every rank the same layers, in the same order")
    if problem is not None:
        raise UsageError(f"partition_method 'profile': rank 0 could not measure the layers: {problem}") from failure
    alike: dict[tuple[str, Contents], list[float]] = defaultdict(list)
    for layer, held, seconds in zip(layers, contents, times, strict=True):
        alike[layer.kind, held].append(seconds)
    return [median(alike[layer.kind, held]) for layer, held in zip(layers, contents, strict=True)]


def _measure(layers: Sequence[Layer], sample: Any, loss_fn: Callable[..., Any] | None, device: torch.device) -> list[float]:
    if not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise UsageError(f"sample: got a {type(sample).__name__}; give one microbatch as the data iterator does: "
                         f"(inputs, labels)")
    value, labels = (_mapped(part, lambda tensor: tensor.to(device)) for part in sample)
    times: list[float] = []
    for layer in layers:
        built = _placed(layer, device)
        ending = loss_fn if layer is layers[-1] else None
        try:
            rounds = [_round(built, value, device, ending, labels, first=layer is layers[0]) for _ in range(_ROUNDS)]
            value = rounds[-1].value
        except Exception as error:
            raise UsageError(f"layer {layer}: {type(error).__name__}: {error}") from error
        times.append(min(each.seconds for each in rounds))
    return times


@dataclass(frozen=True, slots=True)
class _Round:
    value: Any
    seconds: float


def _round(layer: Built, value: Any, device: torch.device, loss_fn: Callable[..., Any] | None, labels: Any, *,
           first: bool) -> _Round:
    """Run a layer forward, with the loss if that is given, and backward as far as its results have gradients."""
    given = _mapped(value, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point() and not first))
    start = _now(device)
    with torch.enable_grad():
        result = layer(given)
        result = result if loss_fn is None else loss_fn(result, labels)
        ends = [tensor for tensor in flatten_tree(result, "a layer's result")[1] if tensor.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])
    seconds = _now(device) - start
    return _Round(_mapped(result, Tensor.detach), seconds)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with each of its tensors changed."""
    skeleton, tensors = flatten_tree(value, "the sample")
    return Skeleton(skeleton).build([change(tensor) for tensor in tensors])


def _placed(layer: Layer, device: torch.device) -> Built:
    """Build a layer, or copy one that is there, for measuring."""
    built = layer.build()
    if isinstance(built.body, nn.Module):
        built.body = (deepcopy(built.body) if built.body is layer.source else built.body).to(device).train()
    return built


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
