"""`read_folder` describes a checkpoint that DeepSpeed wrote at any ZeRO stage, of a model or of a pipeline, as pieces.

Weights come from the optimizer's fp32 masters where there are some, else from the module. Only names, shapes and the
structure of the files are read here; the elements stay in the mapped files until a piece is filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shoal.checkpoint import EXTRA_STATE
from shoal.errors import CheckpointError
from shoal.interchange.archive import Opaque, integer, load_archive
from shoal.interchange.contents import ForeignCheckpoint
from shoal.interchange.layout import HYPERPARAMETERS, RESERVED, Files, flat_fragments

__all__ = ["add_frozen_slices", "add_module", "add_numbers", "load_model_file", "read_folder", "shared_values"]

TIED = "tied_modules."
"""The first word of the name of a weight that layers of a pipeline share."""
AMPLE = 1 << 30
"""More patience than any loss scale has: loading limits it to what is configured."""

State = dict[str, Any]
Groups = Sequence[Sequence[str]]
Shapes = dict[str, tuple[int, ...]]


def read_folder(path: Path, groups: Groups | None = None, *, optimizer: bool = True) -> ForeignCheckpoint:
    """Return the contents of the checkpoint folder `path` (with its tag).

    `groups` are the names of the parameters of each optimizer group, in order: stage 0 saves none. Without `optimizer`,
    or without the names that stage 0 needs, moments are left out. Raises CheckpointError for missing or damaged files, and
    for tensor-parallel parts.
    """
    files = Files.find(path)
    if not files.model:
        raise CheckpointError(f"{path}: has no file mp_rank_00_model_states.pt, so it is not a checkpoint of DeepSpeed")
    extra: dict[str, object] = {}
    stages = {number: {rank: load_model_file(file, extra) for rank, file in ranks.items()}
              for number, ranks in files.model.items()}
    first = stages[min(stages)][0]
    _check_degrees(path, first, files)
    contents = ForeignCheckpoint(step=integer(first.get("global_steps", 0)), ranks=_ranks(files, first), shared={})
    found: list[State] = []
    for number, ranks in stages.items():
        states = [cast("State", load_archive(file)["optimizer_state_dict"])
                  for _, file in sorted(files.optimizer.get(number, {}).items())]
        own = ForeignCheckpoint(step=contents.step, ranks=len(ranks), shared={})
        found.append(_read_optimizer(own, ranks, states, groups, files, optimizer=optimizer))
        contents.add_missing(own)
    tied = dict[str, str]()
    for ranks in stages.values():
        tied |= add_module(contents, ranks)
    for layer, file in files.layers.items():
        _add_layer(contents, layer, cast("State", load_archive(file)))
    _name_tied_weights(contents, files, path)
    contents.check_complete(path)
    contents.shared.update(shared_values(first, found[0]))
    contents.shared.update(tied=tied, extra_states=extra)
    contents.shared["parameters"] = contents.parameters()
    contents.shared["group_names"] = contents.groups or None
    return contents


def load_model_file(file: Path, extra: dict[str, object]) -> State:
    """Return the values of a model file; the extra state of its modules goes to `extra`, by its name in the state dict."""
    state = cast("State", load_archive(file))
    module = cast("dict[str, Any]", state.get("module") or {})
    for name in [name for name in module if name.rpartition(".")[2] == EXTRA_STATE]:
        extra.setdefault(name, _detached(module.pop(name)))
    return state


def shared_values(model: State, optimizer: State) -> dict[str, object]:
    """Return the values that an engine loads, from a model file and an optimizer's state."""
    counters = {name: integer(model.get(name, 0)) for name in ("global_steps", "global_samples", "skipped_steps")}
    schedule = model.get("lr_scheduler")
    client = {key: _detached(value) for key, value in model.items() if key not in RESERVED}
    return {**counters, "client_state": client, "lr_scheduler": schedule if isinstance(schedule, dict) else None,
            "data": None, "optimizer": None, "mesh": None, "loss_scale": _loss_scale(optimizer),
            "groups": [{key: value for key, value in group.items() if key in HYPERPARAMETERS}
                       for group in _param_groups(optimizer)]}


def _check_degrees(path: Path, first: State, files: Files) -> None:
    degrees = cast("Mapping[str, int]", first.get("checkpoint_parallel_dimensions") or {})
    split = degrees.get("tp_degree", 1 if files.layers else first.get("mp_world_size", 1))
    if split > 1:
        raise CheckpointError(f"{path}: was saved by {split} tensor-parallel ranks, whose parts cannot be told apart; "
                              "convert it with DeepSpeed's ds_to_universal, and load that")


def _ranks(files: Files, first: State) -> int:
    return max(sum(map(len, files.optimizer.values())), sum(map(len, files.model.values())),
               integer(first.get("dp_world_size", 1)))


# The optimizer: masters and moments


def _read_optimizer(contents: ForeignCheckpoint, ranks: dict[int, State], states: list[State], groups: Groups | None,
                    files: Files, *, optimizer: bool) -> State:
    """Add the masters and moments of one pipeline stage; return the state of one rank, for its values."""
    model = ranks[0]
    if not states:  # stage 0
        inner = cast("State", model.get("optimizer") or {})
        if inner:
            _add_whole_states(contents, model, inner, groups, optimizer=optimizer)
        return inner
    count = states[0].get("partition_count", len(states))
    if (saved := integer(max(count) if isinstance(count, list) else count)) != len(states):
        raise CheckpointError(f"optimizer files of {len(states)} data ranks, and {saved} have saved; a checkpoint needs the "
                              "files of all ranks in one folder")
    saved_shapes = cast("list[dict[str, Sequence[int]]] | None", model["param_shapes"])
    shapes = _shapes_from_files(states, model, files) if saved_shapes is None else [
        {name: tuple(shape) for name, shape in group.items()} for group in saved_shapes]
    contents.add_groups(shapes)
    if "fp32_flat_groups" in states[0]:
        _add_sliced_groups(contents, states, shapes, optimizer=optimizer)
        add_frozen_slices(contents, ranks)
    else:
        _add_flat_groups(contents, states, shapes, optimizer=optimizer)
    return states[0]


def _add_flat_groups(contents: ForeignCheckpoint, states: list[State], shapes: list[Shapes], *, optimizer: bool) -> None:
    """Add the groups of stages 1 and 2: where a rank's fragments lie is saved, or follows from the shapes."""
    mappings = [state.get("param_slice_mappings") for state in states]
    for index, group in enumerate(shapes):
        computed = flat_fragments(group, len(states))
        reached = dict.fromkeys(group, 0)
        for rank, state in enumerate(states):
            mapping = cast("list[dict[str, object]] | None", mappings[rank])
            fragments = [(fragment.name, fragment.at, fragment.count) for fragment in computed[rank]]
            if mapping is not None:
                fragments = [(name, integer(_attribute(at, "start")), integer(_attribute(at, "numel")))
                             for name, at in mapping[index].items()]
            tensors = {"weight": cast("Tensor", state["single_partition_of_fp32_groups"][index])}
            moments, numbers = _moments(state["base_optimizer_state"], index) if optimizer else ({}, {})
            for name, at, numel in fragments:
                for kind, flat in (tensors | moments).items():
                    contents.add(f"{kind}/{name}", group[name], reached[name], flat[at:at + numel])
                add_numbers(contents, numbers, name)
                reached[name] += numel


def _add_sliced_groups(contents: ForeignCheckpoint, states: list[State], shapes: list[Shapes], *, optimizer: bool) -> None:
    """Add the sub-groups of stage 3, which hold whole slices of successive parameters."""
    ranks = len(states)
    for rank, state in enumerate(states):
        flats = cast("list[Tensor]", state["fp32_flat_groups"])
        index, at = 0, 0
        for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
            width = -(-prod(shape) // ranks)
            while index < len(flats) and at + width > len(flats[index]):
                index, at = index + 1, 0
            if index == len(flats):
                raise CheckpointError(f"{name}: is not in the flat groups of rank {rank}; the model file and the optimizer "
                                      "file belong to different checkpoints")
            start = min(prod(shape), rank * width)
            numel = min(prod(shape), start + width) - start
            moments, numbers = _moments(state["optimizer_state_dict"], index) if optimizer else ({}, {})
            for kind, flat in ({"weight": flats[index]} | moments).items():
                contents.add(f"{kind}/{name}", shape, start, flat[at:at + numel])
            add_numbers(contents, numbers, name)
            at += width


def add_frozen_slices(contents: ForeignCheckpoint, ranks: dict[int, State]) -> None:
    """Add the slices of frozen parameters that the model files of stage 3 hold."""
    shapes = cast("Shapes", ranks[0].get("frozen_param_shapes") or {})
    for name, shape in ((name, shape) for name, shape in shapes.items() if f"weight/{name}" not in contents.pieces):
        width = -(-prod(shape) // len(ranks))
        for rank, state in sorted(ranks.items()):
            start = min(prod(shape), rank * width)
            numel = min(prod(shape), start + width) - start
            contents.add(f"weight/{name}", shape, start, state["frozen_param_fragments"][name].reshape(-1)[:numel])


def _add_whole_states(contents: ForeignCheckpoint, model: State, inner: State, groups: Groups | None, *,
                      optimizer: bool) -> None:
    """Add the state of stage 0, where parameters are numbered in the order of the groups."""
    named = None if model["module"] is None else groups or _only_group(model, inner)
    if named is None and groups is not None and optimizer:
        raise CheckpointError("the optimizer's state of a pipeline at stage 0 is numbered without names; load with "
                              "load_optimizer_states=False, or let DeepSpeed save it at ZeRO stage 1")
    if named is None:
        return
    contents.add_groups(named)
    masters = inner.get("fp32_groups")
    flat = inner.get("fp32_groups_flat")
    base = inner.get("optimizer_state_dict", inner)
    module = cast("dict[str, Tensor]", model["module"] or {})
    number = 0
    for index, names in enumerate(named):
        at = 0
        for place, name in enumerate(names):
            shape = tuple(module[name].shape) if name in module else ()
            if name not in module:
                raise CheckpointError(f"{name}: is a parameter of this engine's optimizer group {index}, and not in the "
                                      "checkpoint; build the same model, or load with load_optimizer_states=False")
            moments, numbers = _moments(base, index if flat is not None else number) if optimizer else ({}, {})
            if flat is not None:
                moments = {"weight": flat[index], **moments}
                moments = {kind: whole[at:at + prod(shape)].view(shape) for kind, whole in moments.items()}
            elif masters is not None:
                moments["weight"] = masters[index][place]
            for kind, whole in moments.items():
                if whole.shape != shape:
                    raise CheckpointError(f"{name}: has shape {shape}, and state number {number} of the optimizer "
                                          f"{tuple(whole.shape)}: the groups of this engine name other parameters, or in "
                                          "another order; build the same groups, or load with load_optimizer_states=False")
                contents.add_whole(f"{kind}/{name}", whole)
            add_numbers(contents, numbers, name)
            number, at = number + 1, at + prod(shape)


def _only_group(model: State, inner: State) -> Groups | None:
    """Return the names of the only group, if the numbers of the optimizer's state are those of the module's parameters."""
    buffers, tied = set(model.get("buffer_names") or ()), _tied_names(model["module"] or {})
    names = [name for name in model["module"] or {} if name not in buffers and name not in tied]
    groups = _param_groups(inner)
    return [names] if len(groups) == 1 and len(groups[0]["params"]) == len(names) else None


def _moments(base: Any, index: int) -> tuple[dict[str, Tensor], Mapping[str, object]]:
    """Return the tensors and the numbers that an optimizer keeps for its parameter `index`."""
    states = cast("dict[int, State]", dict(enumerate(base)) if isinstance(base, list) else base["state"])
    state = states.get(index, {})
    groups = [] if isinstance(base, list) else _param_groups(base)
    tensors = {kind: value for kind, value in state.items() if isinstance(value, Tensor) and value.dim()}
    numbers: dict[str, object] = {kind: value for kind, value in state.items()
               if kind not in tensors and isinstance(value, Tensor | int | float) and not isinstance(value, bool)}
    if tensors and "step" not in numbers and index < len(groups) and "step" in groups[index]:
        numbers["step"] = groups[index]["step"]
    elif any("step" in group for group in groups) and isinstance(numbers.get("step"), int):
        numbers["step"] = _count_of_group(states, groups, index)
    return tensors, numbers


def _count_of_group(states: Mapping[int, State], groups: list[dict[str, Any]], index: int) -> int:
    """Return the steps of the group of parameter `index`: DeepSpeed's Adam counts them in one parameter of each group."""
    group = next((group["params"] for group in groups if index in group["params"]), [index])
    return max(integer(states[number].get("step", 0)) for number in group if number in states)


def add_numbers(contents: ForeignCheckpoint, numbers: Mapping[str, object], name: str) -> None:
    for kind, value in numbers.items():
        data = value.reshape(1) if isinstance(value, Tensor) else torch.tensor([cast("float", value)], dtype=torch.float32)
        if f"scalar.{kind}/{name}" not in contents.pieces:
            contents.add(f"scalar.{kind}/{name}", (), 0, data)


def _param_groups(inner: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of the optimizer's groups, wherever a wrapper keeps them."""
    base = inner.get("optimizer_state_dict") or inner.get("base_optimizer_state") or inner
    return cast("list[dict[str, Any]]", base.get("param_groups", [])) if isinstance(base, dict) else []


def _loss_scale(inner: State) -> dict[str, float]:
    """Return the state of Shoal's loss scale (`precision/loss_scale.py`); a static one has none."""
    scaler = inner.get("loss_scaler")
    state = scaler.state if isinstance(scaler, Opaque) and scaler.state else inner
    if not inner.get("dynamic_loss_scale") or "cur_scale" not in state:
        return {}
    steps, last = cast("int", state.get("cur_iter", 0)), cast("int", state.get("last_overflow_iter", -1))
    return {"value": float(cast("float", state["cur_scale"])), "clean": steps - last - 1, "steps": steps,
            "patience": cast("int", state.get("cur_hysteresis", AMPLE))}


# The module: what the optimizer does not hold


def add_module(contents: ForeignCheckpoint, ranks: dict[int, State]) -> dict[str, str]:
    """Add buffers and the weights that no master covers; return {other name: name} of shared weights."""
    model = ranks[0]
    module = cast("dict[str, Tensor]", model["module"] or {})
    buffers = cast("list[str] | None", model.get("buffer_names"))
    tied = _tied_names(module) | cast("dict[str, str]", model.get("shared_params") or {})
    for name, value in module.items():
        if buffers is not None and name in buffers:
            contents.add_whole(f"buffer/{name}", value)
        elif name not in tied and not _is_placeholder(value):
            if buffers is None:
                contents.add_either(name, value)
            else:
                contents.add_whole(f"weight/{name}", value)
    return tied


def _is_placeholder(value: Tensor) -> bool:
    """Return whether stage 3 saved this in the place of a weight: its elements are in the optimizer files."""
    return value.shape == (0,)


def _tied_names(module: Mapping[str, Tensor]) -> dict[str, str]:
    """Return {other name: first name} of the tensors of a module that are one in memory."""
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, value in module.items():
        if value.numel():
            owner = first.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), name)
            if owner != name:
                tied[name] = owner
    return tied


# Pipelines


def _add_layer(contents: ForeignCheckpoint, layer: int, state: State) -> None:
    """Add what a layer's file holds and no master covers."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            contents.add_either(f"{layer}.{key}", value)


def _name_tied_weights(contents: ForeignCheckpoint, files: Files, path: Path) -> None:
    """Name a weight that layers share by its first layer, as Shoal does, instead of by the key that ties them.

    Every pipeline stage that shares the weight has a copy of it; the first is taken.
    """
    names = {name.partition("/")[2] for name in contents.pieces}
    for name in sorted(name for name in names if name.startswith(TIED)):
        pieces = contents.pieces[f"weight/{name}"]
        whole = _whole(pieces[0].shape, ((piece.start, piece.data) for piece in pieces))
        suffix = name.removeprefix(TIED).partition(".")[2]
        layer = next((layer for layer in sorted(files.layers)
                      if _is_rounded(contents, f"weight/{layer}.{suffix}", whole)), None)
        if layer is None:
            raise CheckpointError(f"{path}: no layer's file holds the shared weight {name!r}, so its layers are not known")
        contents.pieces.pop(f"weight/{layer}.{suffix}")
        contents.pieces.pop(f"buffer/{layer}.{suffix}")
        contents.unsure.discard(f"{layer}.{suffix}")
        contents.rename(name, f"{layer}.{suffix}")


def _is_rounded(contents: ForeignCheckpoint, name: str, master: Tensor) -> bool:
    """Return whether the whole tensor `name` is `master`, rounded to its own dtype."""
    pieces = contents.pieces.get(name)
    return (pieces is not None and len(pieces) == 1 and pieces[0].shape == master.shape
            and torch.equal(master.reshape(-1).to(pieces[0].data.dtype), pieces[0].data))


def _whole(shape: Sequence[int], parts: Iterator[tuple[int, Tensor]]) -> Tensor:
    whole = torch.zeros(prod(shape), dtype=torch.float32)
    for start, data in parts:
        whole[start:start + len(data)] = data
    return whole.view(tuple(shape))


def _shapes_from_files(states: list[State], model: State, files: Files) -> list[Shapes]:
    """Return the shapes of each group where only numbers of elements were saved: bf16 in a pipeline at stage 0."""
    found = {name: tuple(value.shape) for name, value in cast("dict[str, Tensor]", model["module"] or {}).items()}
    for layer, file in files.layers.items():
        found |= {f"{layer}.{key}": tuple(value.shape) for key, value in load_archive(file).items()}
    shapes: list[Shapes] = []
    for index in range(len(states[0]["param_slice_mappings"])):
        counts: dict[str, int] = {}
        for state in states:
            for name, at in state["param_slice_mappings"][index].items():
                counts[name] = counts.get(name, 0) + integer(_attribute(at, "numel"))
        shapes.append({name: found[name] if name in found else _tied_shape(name, count, found)
                       for name, count in counts.items()})
    return shapes


def _tied_shape(name: str, count: int, found: Shapes) -> tuple[int, ...]:
    suffix = name.removeprefix(TIED).partition(".")[2]
    for other, shape in found.items():
        if other.partition(".")[2] == suffix and prod(shape) == count:
            return shape
    raise CheckpointError(f"{name}: no file tells its shape")


def _attribute(record: object, name: str) -> object:
    """Return a named value of a saved record, or of a dict in its place."""
    if isinstance(record, Opaque):
        return record.attribute(name)
    return cast("dict[str, object]", record)[name]


def _detached(value: object) -> Any:
    """Return the client's state without references to the mapped file."""
    match value:
        case Tensor():
            return value.clone()
        case dict():
            return {key: _detached(each) for key, each in cast("dict[object, object]", value).items()}
        case list() | tuple():
            return type(value)(_detached(each) for each in cast("list[object]", value))
        case _:
            return value
