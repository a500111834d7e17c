"""Convert between a sharded optimizer and one portable state dict: by the parameters' names, of their full shapes.

    {"state": {"blocks.0.up.weight": {"step": tensor(3.), "exp_avg": tensor(...), ...}, ...},
     "param_groups": [{"lr": 0.001, ..., "params": ["blocks.0.up.weight", ...]}, ...]}

Rank 0 has the state, on the CPU, and the others its groups alone, as with FSDP's full state dict. A torch optimizer over the
same groups loads it as it is, for torch matches parameters by their place. For the same reason the state dict of such an
optimizer, whose parameters are numbers, loads here. To load, one rank that has the state gives it to all, tensor by tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from shoal.checkpoint.piece import Box, Interval, Piece, overlaps
from shoal.engine.training_state import NUMBER, SCALAR, moments_to_load, moments_to_save, parameter_shapes
from shoal.errors import UsageError
from shoal.optim.masks import MASK
from shoal.optim.sharded import ShardedOptimizer
from shoal.zero.sharded import ShardedModel

__all__ = ["consolidate", "load"]

BATCH_BYTES = 64 << 20
"""Bytes that a rank sends to rank 0 at once."""
SHOWN = 5
Shape = tuple[int, ...]


# Saving


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """One piece of state on its way to rank 0."""

    name: str
    shape: Shape
    dtype: torch.dtype
    interval: Interval

    @property
    def bytes(self) -> int:
        return self.interval.elements * self.dtype.itemsize


@torch.no_grad()
def consolidate(model: ShardedModel, optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Return the portable state dict; its state is on rank 0 alone. A collective call."""
    world = model.parameter_groups.world
    batches = list(_batches(moments_to_save(model, optimizer)))
    sent = world.gather_objects([[_Sent(name=piece.name, shape=piece.shape, dtype=piece.data.dtype, interval=piece.interval)
                                  for piece in batch] for batch in batches])
    tensors: dict[str, Tensor] = {}
    for number in range(max(map(len, sent))):
        senders = {rank: ranks_batches[number] for rank, ranks_batches in enumerate(sent) if number < len(ranks_batches)}
        own = _bytes_of(batches[number]) if number < len(batches) else None
        parts = world.gather_to_first(own, {rank: ((sum(piece.bytes for piece in pieces),), torch.uint8)
                                            for rank, pieces in senders.items()})
        for part, pieces in zip(parts, senders.values(), strict=False):
            _place(part, pieces, tensors)
    return {"state": _by_parameter(tensors), "param_groups": [
        {**{key: value for key, value in group.items() if key not in ("params", MASK)}, "params": names}
        for group, names in zip(optimizer.param_groups, _group_names(model, optimizer), strict=True)]}


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Divide `pieces` into lists of about `BATCH_BYTES`."""
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if sum(each.data.nbytes for each in batch) >= BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _bytes_of(pieces: Sequence[Piece]) -> Tensor:
    """Return the data of `pieces`, one after the other, on the CPU."""
    parts: list[Tensor] = []
    for piece in pieces:
        with nullcontext() if piece.hold is None else piece.hold(False):
            parts.append(piece.data.detach().to("cpu", copy=True).view(torch.uint8))
    return torch.cat(parts)


def _place(part: Tensor, pieces: Sequence[_Sent], tensors: dict[str, Tensor]) -> None:
    """Copy the pieces that `part` holds to their places in `tensors`."""
    for data, piece in zip(part.split([piece.bytes for piece in pieces]), pieces, strict=True):
        if piece.name not in tensors:
            tensors[piece.name] = torch.zeros(piece.shape, dtype=piece.dtype, device="cpu")
        whole = tensors[piece.name].view(-1)
        for overlap in overlaps(piece.interval, _whole(piece.shape)):
            overlap.copy(data.clone().view(piece.dtype), whole)  # a copy is aligned to its dtype


def _whole(shape: Shape) -> Interval:
    return Interval(Box((0,) * len(shape), shape), 0, prod(shape))


def _by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor | float]]:
    state: dict[str, dict[str, Tensor | float]] = defaultdict(dict)
    for name, tensor in tensors.items():
        kind, _, parameter = name.partition("/")
        value = tensor.item() if kind.startswith(NUMBER) else tensor
        state[parameter][kind.removeprefix(SCALAR).removeprefix(NUMBER)] = value
    return dict(state)


def _group_names(model: ShardedModel, optimizer: ShardedOptimizer) -> list[list[str]]:
    """Return the names of each group's parameters, of all pipeline stages."""
    names = {parameter: name for name, parameter in model.named().items()}
    own = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    stages = model.parameter_groups.communicator("pipeline").gather_objects(own)
    return [list(dict.fromkeys(name for stage in stages for name in stage[index])) for index in range(len(own))]


# Loading


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """The contents of a state dict without its tensors, under the names of a checkpoint's pieces; equal on all ranks."""

    tensors: dict[str, tuple[Shape, torch.dtype]]
    scalars: dict[str, Tensor]
    groups: list[dict[str, Any]]

    def names(self) -> list[str]:
        """Return the names of all pieces of state."""
        return [*self.tensors, *self.scalars]

    def tensor(self, name: str) -> Tensor:
        """Return the value of a scalar."""
        return self.scalars[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a piece."""
        return self.tensors[name][1] if name in self.tensors else self.scalars[name].dtype


@torch.no_grad()
def load(model: ShardedModel, optimizer: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a portable state dict, or that of a torch optimizer over the same groups; at least one rank has the state.

    A collective call. Raises `UsageError` on every rank for a dict that does not fit; nothing is changed then.
    """
    world = model.parameter_groups.world
    names, shapes = _group_names(model, optimizer), parameter_shapes(model)
    shapes = {name: shape for stage in model.parameter_groups.communicator("pipeline").gather_objects(shapes)
              for name, shape in stage.items()}
    values: dict[str, Tensor] = {}
    contents: _Contents | None = None
    problem = ""
    try:
        contents = _contents(state_dict, names, shapes, values)
    except UsageError as error:
        problem = str(error)
    found = world.gather_objects((problem, contents))
    if problems := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text]:
        raise UsageError(f"optimizer.load_state_dict: {problems[0]}. Nothing was loaded")
    by_rank = [cast("_Contents", each) for _, each in found]
    source = next((rank for rank, each in enumerate(by_rank) if each.names()), 0)
    chosen = by_rank[source]
    wanted: dict[str, list[Piece]] = defaultdict(list)
    for piece in moments_to_load(model, optimizer, chosen):
        wanted[piece.name].append(piece)
    device = model.storage.device
    for name, (shape, dtype) in chosen.tensors.items():
        whole = torch.empty(prod(shape), dtype=dtype, device=device)
        if world.rank == source:
            whole.copy_(values[name].reshape(-1))
        world.broadcast(whole, source, f"optimizer state '{name}'")
        for piece in wanted[name]:
            with nullcontext() if piece.hold is None else piece.hold(True):
                for overlap in overlaps(_whole(shape), piece.interval):
                    overlap.copy(whole, piece.data)
    for group, options in zip(optimizer.param_groups, chosen.groups, strict=True):
        group.update(options)
    optimizer.set_compression()


def _contents(state_dict: Mapping[str, Any], names: list[list[str]], shapes: Mapping[str, Sequence[int]],
              values: dict[str, Tensor]) -> _Contents:
    """Return the contents of `state_dict`, and put its tensors into `values`."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise UsageError(f"got a dict of {', '.join(map(str, state_dict)) or 'nothing'}; give what optimizer.state_dict() "
                         f"returned, with 'state' and 'param_groups'")
    groups = cast("list[dict[str, Any]]", state_dict["param_groups"])
    if [len(group["params"]) for group in groups] != [len(group) for group in names]:
        raise UsageError(f"the dict has groups of {[len(group['params']) for group in groups]} parameters, this optimizer "
                         f"has {[len(group) for group in names]}; build the same groups of the same parameters")
    name_of: dict[object, str] = {}
    for group, own in zip(groups, names, strict=True):
        by_name = set(group["params"]) == set(own)  # a torch optimizer counts its parameters
        name_of |= {key: key if by_name else name for key, name in zip(group["params"], own, strict=True)}
    contents = _Contents(tensors={}, scalars={}, groups=[
        {key: value for key, value in group.items() if key not in ("params", "param_names", MASK)} for group in groups])
    problems: list[str] = []
    for key, state in cast("Mapping[object, Mapping[str, Any]]", state_dict["state"]).items():
        if (name := name_of.get(key)) is None:
            problems.append(f"{key}: in no group of the dict")
            continue
        for kind, value in state.items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                contents.scalars[f"{NUMBER}{kind}/{name}"] = torch.tensor(float(value), dtype=torch.float64, device="cpu")
            elif value.dim() == 0 and (kind == "step" or shapes[name]):
                contents.scalars[f"{SCALAR}{kind}/{name}"] = value.cpu()
            elif list(value.shape) != list(shapes[name]):
                problems.append(f"{kind} of {name}: got {tuple(value.shape)}, the parameter has {tuple(shapes[name])}")
            else:
                values[f"{kind}/{name}"] = value
                contents.tensors[f"{kind}/{name}"] = tuple(value.shape), value.dtype
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise UsageError("; ".join(problems[:SHOWN]) + more)
    return contents
