"""`write_folder` writes a snapshot as a checkpoint of DeepSpeed, for any ZeRO stage and any number of data ranks.

A run can so go back, or on, to an installation of DeepSpeed. One rank's part is in memory at a time; its elements are filled
from the snapshot straight into the flat buffers of the layout (`layout.py`).
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shoal.checkpoint import Piece, Snapshot
from shoal.checkpoint.folder import LATEST
from shoal.errors import CheckpointError, UsageError
from shoal.interchange.layout import (
    HYPERPARAMETERS,
    RESERVED,
    Fragment,
    flat_fragments,
    flat_part,
    model_file,
    optimizer_file,
    sliced_fragments,
)
from shoal.interchange.published_objects import fragment_address, loss_scaler, save_archive
from shoal.log import warn_once

__all__ = ["SCALAR", "SavedModel", "Target", "model_state", "optimizer_values", "write_folder", "write_ranks"]

VERSION = "0.19.8"
"""The version of DeepSpeed whose layout is written."""
SCALAR = "scalar."
NEUTRAL: Mapping[str, object] = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
                                 "differentiable": False, "fused": None}
"""Options of torch's optimizers that choose an implementation, as DeepSpeed leaves them."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The run that is to load the checkpoint."""

    stage: int
    ranks: int
    """Data-parallel ranks."""
    dtype: torch.dtype = torch.float32
    """The dtype of compute."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The configuration that is saved for readers; loading does not need it."""
    clip_grad: float = 0.0

    def __post_init__(self) -> None:
        if self.stage not in range(4):
            raise UsageError(f"stage: got {self.stage}; choose 0, 1, 2 or 3")
        if self.ranks < 1:
            raise UsageError(f"ranks: got {self.ranks}; choose 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """The parameters of a snapshot as the optimizer groups them."""

    groups: list[Shapes]
    frozen: Shapes
    buffers: list[str]
    tied: dict[str, str]
    kinds: list[str]
    """The optimizer's tensors of a parameter's shape."""
    numbers: list[str]
    """The optimizer's numbers, one for each parameter."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> SavedModel:
        names = snapshot.names()
        kinds = sorted({kind for kind, _, _ in (name.partition("/") for name in names)} - {"weight", "buffer", "published"})
        shapes = {name.partition("/")[2]: snapshot.shape(name) for name in names if name.startswith("weight/")}
        groups = [{name: shapes[name] for name in group} for group in _group_names(snapshot, shapes)]
        trained = {name for group in groups for name in group}
        return cls(groups=groups, frozen={name: shape for name, shape in shapes.items() if name not in trained},
                   buffers=[name.partition("/")[2] for name in names if name.startswith("buffer/")],
                   tied=cast("dict[str, str]", snapshot.shared.get("tied") or {}),
                   kinds=[kind for kind in kinds if "." not in kind],
                   numbers=[kind.removeprefix(SCALAR) for kind in kinds if kind.startswith(SCALAR)])

    @property
    def trained(self) -> Shapes:
        return {name: shape for group in self.groups for name, shape in group.items()}


def write_folder(snapshot: Snapshot, out: str | os.PathLike[str], tag: str, target: Target) -> Path:
    """Write `out/tag` with its files, point `out/latest` to it, and return its path.

    The folder appears under its tag when it is complete. Raises CheckpointError if it exists, or the snapshot does not tell
    the groups of its parameters.
    """
    parent = Path(out)
    path = parent / tag
    if path.exists():
        raise CheckpointError(f"{path}: exists; choose another folder or tag, or remove it")
    parent.mkdir(parents=True, exist_ok=True)
    draft = parent / f".{tag}.{uuid.uuid4().hex}"
    draft.mkdir()
    try:
        write_ranks(snapshot, draft, target, range(target.ranks))
        os.rename(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    (parent / LATEST).write_text(tag)
    return path


def write_ranks(snapshot: Snapshot, folder: Path, target: Target, ranks: Iterable[int]) -> None:
    """Write into `folder` the files of some data `ranks`; the part of one rank is in memory at a time."""
    model = SavedModel.of(snapshot)
    for rank in ranks:
        if rank == 0 or target.stage == 3:
            save_archive(model_state(snapshot, model, target, rank), folder / model_file(target.stage, rank))
        if target.stage:
            state = {"optimizer_state_dict": _optimizer_state(snapshot, model, target, rank), "ds_config": {**target.config},
                     "ds_version": VERSION}
            save_archive(state, folder / optimizer_file(rank, bf16=target.dtype == torch.bfloat16))


def _group_names(snapshot: Snapshot, shapes: Shapes) -> Sequence[Sequence[str]]:
    """Return the parameters of each optimizer group."""
    options = cast("list[object]", snapshot.shared.get("groups") or [])
    named = cast("list[list[str]] | None", snapshot.shared.get("group_names"))
    if named is not None:
        return named
    if len(options) > 1:
        raise CheckpointError(f"{snapshot.path}: has {len(options)} optimizer groups, and does not tell which parameters "
                              "they hold; save it again with this version of Shoal")
    return [list(shapes)]


def model_state(snapshot: Snapshot, model: SavedModel, target: Target, rank: int) -> dict[str, Any]:
    """Return the content of a model file: the module, counters, and the client's state."""
    shared = snapshot.shared
    client = cast("dict[str, object]", shared.get("client_state") or {})
    if taken := sorted(RESERVED & client.keys()):
        raise CheckpointError(f"client_state: the keys {', '.join(taken)} are DeepSpeed's own; save under other names")
    zero = target.stage > 0
    trained, frozen = model.trained, model.frozen
    shapes = [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in model.groups]
    return {
        "module": _module(snapshot, model, target), "buffer_names": model.buffers,
        "optimizer": None if zero else _whole_optimizer(snapshot, model, target),
        "param_shapes": shapes if zero else None,
        "frozen_param_shapes": OrderedDict((name, torch.Size(shape)) for name, shape in frozen.items())
        if zero and frozen else None,
        "frozen_param_fragments": _frozen_parts(snapshot, frozen, target, rank) if zero and frozen else None,
        "shared_params": {alias: name for alias, name in model.tied.items() if name in trained} if zero else None,
        "lr_scheduler": shared.get("lr_scheduler"), "data_sampler": None, "random_ltd": None,
        **{name: shared.get(name, 0) for name in ("skipped_steps", "global_steps", "global_samples")},
        "dp_world_size": target.ranks, "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_config": {**target.config},
        "ds_version": VERSION, **client}


def _module(snapshot: Snapshot, model: SavedModel, target: Target) -> OrderedDict[str, Any]:
    """Return the state dict of the module; at stage 3 weights are empty there. Tied names share one tensor."""
    state = OrderedDict[str, Any]()
    for name in model.buffers:
        state[name] = snapshot.tensor(f"buffer/{name}")
    for name in (*model.trained, *model.frozen):
        state[name] = (torch.empty(0, dtype=target.dtype) if target.stage == 3 else
                       snapshot.tensor(f"weight/{name}", target.dtype))
    extra = cast("dict[str, Any]", snapshot.shared.get("extra_states", {}))
    return state | {alias: state[name] for alias, name in model.tied.items() if name in state} | extra


def _frozen_parts(snapshot: Snapshot, frozen: Shapes, target: Target, rank: int) -> dict[str, Tensor]:
    """Return one rank's slice of each frozen parameter, padded; the whole parameter where weights are not sharded."""
    if target.stage < 3:
        return {name: snapshot.tensor(f"weight/{name}", target.dtype) for name in frozen}
    slices: dict[str, Tensor] = {}
    for fragment in list(sliced_fragments(frozen, target.ranks))[rank]:
        slices[fragment.name] = torch.zeros(-(-prod(fragment.shape) // target.ranks), dtype=target.dtype)
        _fill(snapshot, "weight", fragment, slices[fragment.name])
    return slices


def _optimizer_state(snapshot: Snapshot, model: SavedModel, target: Target, rank: int) -> dict[str, Any]:
    """Return the content of an optimizer file: one rank's part of masters and moments."""
    groups: list[tuple[list[Fragment], int]] = []
    for shapes in model.groups:
        if target.stage == 3:
            fragments = list(sliced_fragments(shapes, target.ranks))[rank]
            groups.append((fragments, sum(-(-prod(shape) // target.ranks) for shape in shapes.values())))
        else:
            groups.append((flat_fragments(shapes, target.ranks)[rank], flat_part(shapes, target.ranks)))
    masters = [_flat(snapshot, "weight", fragments, width) for fragments, width in groups]
    base = _flat_state(snapshot, model, groups)
    common = optimizer_values(snapshot, model, target)
    common.pop("param_groups")
    if target.stage == 3:
        return {**common, "partition_count": target.ranks, "optimizer_state_dict": base, "fp32_flat_groups": masters}
    paddings = [flat_part(shapes, target.ranks) * target.ranks - sum(map(prod, shapes.values())) for shapes in model.groups]
    last = rank == target.ranks - 1
    return {**common, "base_optimizer_state": base, "clip_grad": target.clip_grad,
            "param_slice_mappings": [OrderedDict((each.name, fragment_address(each.count, each.at)) for each in fragments)
                                     for fragments, _ in groups],
            "single_partition_of_fp32_groups": [_lean(master, fragments) for master, (fragments, _)
                                                in zip(masters, groups, strict=True)],
            "group_paddings": [padding if last else 0 for padding in paddings],
            "param_alignment_paddings": [[0] * len(shapes) for shapes in model.groups],
            "partition_count": [target.ranks] * len(groups)}


def optimizer_values(snapshot: Snapshot, model: SavedModel, target: Target) -> dict[str, Any]:
    """Return the values of an optimizer file that are the same for all ranks, and the options of the groups."""
    scale = cast("dict[str, float]", snapshot.shared.get("loss_scale") or {})
    return {"dynamic_loss_scale": bool(scale), "overflow": False, "zero_stage": target.stage,
            "loss_scaler": loss_scaler(scale), "ds_version": VERSION, "param_groups": _numbered_options(snapshot, model)}


def _numbered_options(snapshot: Snapshot, model: SavedModel) -> list[dict[str, object]]:
    """Return the options of the groups, each of which is one flat parameter."""
    return [{**options, "params": [index]} for index, options in enumerate(_options(snapshot, model))]


def _flat(snapshot: Snapshot, kind: str, fragments: list[Fragment], width: int) -> Tensor:
    """Return one rank's flat buffer of `width` elements; padding is zero, as is state that a parameter does not have."""
    flat = torch.zeros(width, dtype=torch.float32)
    for fragment in fragments:
        _fill(snapshot, kind, fragment, flat[fragment.at:fragment.at + fragment.count])
    return flat


def _fill(snapshot: Snapshot, kind: str, fragment: Fragment, data: Tensor) -> None:
    if f"{kind}/{fragment.name}" in snapshot and fragment.count:
        snapshot.fill([Piece(name=f"{kind}/{fragment.name}", shape=fragment.shape, start=fragment.start,
                             stop=fragment.start + fragment.count, data=data[:fragment.count])])


def _lean(master: Tensor, fragments: list[Fragment]) -> Tensor:
    """Return a flat buffer without the padding at its end, as DeepSpeed saves masters."""
    return master[:max((fragment.at + fragment.count for fragment in fragments), default=0)].clone()


def _steps(snapshot: Snapshot, model: SavedModel, names: list[str]) -> dict[str, Tensor]:
    """Return the numbers of a group: DeepSpeed has one for all of its parameters."""
    numbers: dict[str, Tensor] = {}
    for kind in model.numbers:
        saved = [snapshot.tensor(f"{SCALAR}{kind}/{name}") for name in names if f"{SCALAR}{kind}/{name}" in snapshot]
        counts = sorted({each.item() for each in saved})
        if len(counts) > 1:
            warn_once(f"{snapshot.path}: parameters of one optimizer group were stepped {counts} times; DeepSpeed keeps one "
                      "count for all of them, and the largest is written")
        if saved:
            numbers[kind] = max(saved, key=Tensor.item)
    return numbers


def _options(snapshot: Snapshot, model: SavedModel) -> Iterator[dict[str, object]]:
    saved = cast("list[dict[str, object]]", snapshot.shared.get("groups") or [{} for _ in model.groups])
    adam = {"bias_correction": True} if {"exp_avg", "exp_avg_sq"} <= {*model.kinds} else {}
    for options in saved:
        yield {**NEUTRAL, **adam, **{key: value for key, value in options.items() if key in HYPERPARAMETERS or key in adam}}


def _whole_optimizer(snapshot: Snapshot, model: SavedModel, target: Target) -> dict[str, Any]:
    """Return the optimizer's state of stage 0: in 16 bits with its masters, flat where the optimizer is one of Adam's."""
    if target.dtype == torch.float32:
        return _numbered_state(snapshot, model)
    scale = optimizer_values(snapshot, model, target)
    scaler = vars(scale["loss_scaler"])
    values: dict[str, Any] = {"dynamic_loss_scale": scaler["dynamic"], "cur_scale": scaler["cur_scale"],
                              "cur_iter": scaler.get("cur_iter", 0), "clip_grad": target.clip_grad}
    if scaler["dynamic"]:
        values |= {name: scaler[name] for name in ("last_overflow_iter", "scale_factor", "scale_window")}
    if "Adam" not in str(snapshot.shared.get("optimizer")):
        masters = [[snapshot.tensor(f"weight/{name}", torch.float32) for name in shapes] for shapes in model.groups]
        return {**values, "optimizer_state_dict": _numbered_state(snapshot, model), "fp32_groups": masters}
    groups = [(_end_to_end(shapes), sum(map(prod, shapes.values()))) for shapes in model.groups]
    return {**values, "optimizer_state_dict": _flat_state(snapshot, model, groups),
            "fp32_groups_flat": [_flat(snapshot, "weight", *group) for group in groups]}


def _end_to_end(shapes: Shapes) -> list[Fragment]:
    """Return whole parameters that lie one behind the other in a flat buffer."""
    starts = accumulate(map(prod, shapes.values()), initial=0)
    return [Fragment(name=name, shape=shape, start=0, at=at, count=prod(shape))
            for (name, shape), at in zip(shapes.items(), starts, strict=False)]


def _flat_state(snapshot: Snapshot, model: SavedModel, groups: list[tuple[list[Fragment], int]]) -> dict[str, Any]:
    """Return the state of the optimizer whose parameters are the flat buffers of the groups."""
    state = {index: {**_steps(snapshot, model, [*model.groups[index]]),
                     **{kind: _flat(snapshot, kind, *group) for kind in model.kinds}}
             for index, group in enumerate(groups)} if model.kinds or model.numbers else {}
    return {"state": state, "param_groups": _numbered_options(snapshot, model)}


def _numbered_state(snapshot: Snapshot, model: SavedModel) -> dict[str, Any]:
    """Return the state of torch's own optimizers, by the number of the parameter."""
    numbers = {name: number for number, name in enumerate(model.trained)}
    state = {number: {**_steps(snapshot, model, [name]),
                      **{kind: snapshot.tensor(f"{kind}/{name}") for kind in model.kinds if f"{kind}/{name}" in snapshot}}
             for name, number in numbers.items()}
    groups = [{**options, "params": [numbers[name] for name in shapes]}
              for options, shapes in zip(_options(snapshot, model), model.groups, strict=True)]
    return {"state": state, "param_groups": groups}
