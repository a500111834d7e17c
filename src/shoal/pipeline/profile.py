"""Measures the forward and backward time of each layer: rank 0 runs one microbatch through one layer at a time."""

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

from shoal.device import forked_rng, synchronize
from shoal.errors import RanksDisagree, UsageError
from shoal.pipeline.layer import Built, Contents, Layer
from shoal.pipeline.value_tree import TreeSpec, flatten_tree
from shoal.transport import process_group
from shoal.transport.collectives import Communicator

__all__ = ["measured"]

_ROUNDS = 4  # runs of each layer; the fastest counts
_TIMEOUT = 3600.0  # seconds to build and run the whole model, layer by layer


def measured(layers: Sequence[Layer], contents: Sequence[Contents], sample: Any,
             loss_fn: Callable[..., Any] | None) -> list[float]:
    """Return the seconds of each layer, the same on every rank: rank 0 measures. A collective.

    `sample` is one microbatch, (inputs, labels). The last layer's time includes the loss. Recomputation is not measured: it
    adds to every layer in the same proportion. Layers of one class with equal parameter counts get the median of their
    times. Raises `UsageError` on every rank if a layer fails.
    """
    group = dist.group.WORLD
    assert group is not None
    measured_times: list[float] = []
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            with forked_rng():
                measured_times = _measure(layers, sample, loss_fn, process_group.device())
        except Exception as error:  # sent to the other ranks, which wait for the result
            failure = error
    problem = None if failure is None else f"{type(failure).__name__}: {failure}"
    names = [f"{layer} of {held.parameters} parameters" for layer, held in zip(layers, contents, strict=True)]
    reports = Communicator(group, timeout=_TIMEOUT).gather_objects((measured_times, problem, names))
    times, problem, expected = reports[0]
    for rank, (_, _, names) in enumerate(reports):
        for index, (first, other) in enumerate(zip_longest(expected, names, fillvalue="none")):
            if first != other:
                raise RanksDisagree(f"PipelineModule: ranks differ in layer {index}: rank 0 has {first}, rank {rank} has "
                                    f"{other}; give every rank the same layers, in the same order")
    if problem is not None:
        raise UsageError(f"partition_method 'profile': rank 0 could not measure the layers: {problem}") from failure
    equal: dict[tuple[str, Contents], list[float]] = defaultdict(list)
    for layer, held, seconds in zip(layers, contents, times, strict=True):
        equal[layer.kind, held].append(seconds)
    return [median(equal[layer.kind, held]) for layer, held in zip(layers, contents, strict=True)]


def _measure(layers: Sequence[Layer], sample: Any, loss_fn: Callable[..., Any] | None, device: torch.device) -> list[float]:
    if not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise UsageError(f"sample: got a {type(sample).__name__}; give one microbatch as the data iterator does: "
                         f"(inputs, labels)")
    value, labels = (_map_tensors(part, lambda tensor: tensor.to(device)) for part in sample)
    times: list[float] = []
    for layer in layers:
        built = _build_for_measuring(layer, device)
        layer_loss = loss_fn if layer is layers[-1] else None
        try:
            rounds = [_run_once(built, value, device, layer_loss, labels, first=layer is layers[0]) for _ in range(_ROUNDS)]
            value = rounds[-1].value
        except Exception as error:
            raise UsageError(f"layer {layer}: {type(error).__name__}: {error}") from error
        times.append(min(each.seconds for each in rounds))
    return times


@dataclass(frozen=True, slots=True)
class _Run:
    value: Any
    seconds: float


def _run_once(layer: Built, value: Any, device: torch.device, loss_fn: Callable[..., Any] | None, labels: Any, *,
              first: bool) -> _Run:
    """Run a layer forward, then the loss if one is given, then backward from the results that require gradients."""
    inputs = _map_tensors(value, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point() and not first))
    start = _now(device)
    with torch.enable_grad():
        result = layer(inputs)
        result = result if loss_fn is None else loss_fn(result, labels)
        outputs = [tensor for tensor in flatten_tree(result, "a layer's result")[1] if tensor.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
    seconds = _now(device) - start
    return _Run(_map_tensors(result, Tensor.detach), seconds)


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `function` applied to each of its tensors."""
    spec, tensors = flatten_tree(value, "the sample")
    return TreeSpec(spec).unflatten([function(tensor) for tensor in tensors])


def _build_for_measuring(layer: Layer, device: torch.device) -> Built:
    """Build a layer from its spec, or copy the given module, on `device` and in training mode."""
    built = layer.build()
    if isinstance(built.body, nn.Module):
        built.body = (deepcopy(built.body) if built.body is layer.source else built.body).to(device).train()
    return built


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()
