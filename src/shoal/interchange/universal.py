"""`read_universal` and `write_universal` know DeepSpeed's universal form: a folder for each parameter, of whole tensors.

    DIR/TAG/zero/NAME/fp32.pt, exp_avg.pt, ...    a tensor, or {"param": tensor}
    DIR/TAG/zero/optimizer_state.pt               the values of the optimizer: its groups and their options
    DIR/TAG/*mp_rank_*_model_states.pt            counters, buffers, frozen parameters and the client's state
    DIR/latest_universal                          the tag
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shoal.checkpoint import Snapshot
from shoal.errors import CheckpointError
from shoal.interchange.archive import integer, load_archive
from shoal.interchange.contents import ForeignCheckpoint
from shoal.interchange.layout import Files, model_file
from shoal.interchange.published_objects import save_archive
from shoal.interchange.reader import add_frozen_slices, add_module, add_numbers, load_model_file, shared_values
from shoal.interchange.writer import SCALAR, SavedModel, Target, model_state, optimizer_values

__all__ = ["LATEST_UNIVERSAL", "is_universal", "read_universal", "write_universal"]

ZERO = "zero"
OPTIMIZER = "optimizer_state.pt"
MASTER = "fp32"
LATEST_UNIVERSAL = "latest_universal"
UNIVERSAL_INFO = "universal_checkpoint_info"
VERSION = 0.4


def is_universal(path: Path) -> bool:
    """Return whether the folder holds the universal form."""
    return (path / ZERO).is_dir()


def read_universal(path: Path) -> ForeignCheckpoint:
    """Return the contents of the universal checkpoint in the folder `path`. Raises CheckpointError if it is incomplete."""
    files = Files.find(path)
    if not files.model:
        raise CheckpointError(f"{path}: has no model file, so its counters and buffers are missing")
    extra: dict[str, object] = {}
    stages = {number: {rank: load_model_file(file, extra) for rank, file in ranks.items()}
              for number, ranks in files.model.items()}
    first = stages[min(stages)][0]
    contents = ForeignCheckpoint(step=integer(first.get("global_steps", 0)), ranks=max(map(len, stages.values())), shared={})
    optimizer = cast("dict[str, Any]", load_archive(path / ZERO / OPTIMIZER))
    numbers = _numbers(optimizer)
    shapes = {name: shape for ranks in stages.values() for group in ranks[0].get("param_shapes") or []
              for name, shape in cast("dict[str, tuple[int, ...]]", group).items()}
    others = {name for ranks in stages.values() for key in ("buffer_names", "shared_params")
              for name in cast("list[str]", ranks[0].get(key) or [])}  # these have folders too, after stages 1 and 2
    for folder in (folder for folder in sorted(path.glob(f"{ZERO}/*/")) if folder.name not in others):
        for file in sorted(folder.glob("*.pt")):
            kind = "weight" if file.stem == MASTER else file.stem
            value = _tensor(load_archive(file), file)
            if value.dim():  # flat where stage 3 saved it
                contents.add_whole(f"{kind}/{folder.name}", value.reshape(shapes.get(folder.name, value.shape)))
            else:
                add_numbers(contents, {kind: value}, folder.name)
        add_numbers(contents, numbers, folder.name)
    tied = dict[str, str]()
    for ranks in stages.values():
        add_frozen_slices(contents, ranks)
        tied |= add_module(contents, ranks)
    contents.shared.update(shared_values(first, optimizer))
    contents.shared.update(tied=tied, extra_states=extra)
    for ranks in stages.values():
        contents.add_groups(cast("list[dict[str, object]]", ranks[0].get("param_shapes") or []))
    contents.shared["parameters"] = contents.parameters()
    contents.shared["group_names"] = contents.groups or None
    return contents


def write_universal(snapshot: Snapshot, path: Path) -> Path:
    """Write `snapshot` in the universal form as the folder `path`, point `latest_universal` beside it to it; return it.

    The folder appears when it is complete. Raises CheckpointError if it exists.
    """
    if path.exists():
        raise CheckpointError(f"{path}: exists; choose another folder, or remove it")
    model = SavedModel.of(snapshot)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        for name in model.trained:
            folder = draft / ZERO / name
            folder.mkdir(parents=True)
            kinds = {MASTER: "weight", **{kind: kind for kind in model.kinds}}
            kinds |= {kind: f"{SCALAR}{kind}" for kind in model.numbers}
            for file, kind in ((file, kind) for file, kind in kinds.items() if f"{kind}/{name}" in snapshot):
                save_archive({"param": snapshot.tensor(f"{kind}/{name}")} if kind == "weight" or file in model.kinds else
                             snapshot.tensor(f"{kind}/{name}"), folder / f"{file}.pt")
        target = Target(stage=1, ranks=1)
        state = {UNIVERSAL_INFO: {"universal_checkpoint_version": VERSION}} | model_state(snapshot, model, target, 0)
        save_archive(state, draft / model_file(1, 0))
        save_archive(optimizer_values(snapshot, model, target), draft / ZERO / OPTIMIZER)
        os.rename(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    (path.parent / LATEST_UNIVERSAL).write_text(path.name)
    return path


def _tensor(saved: object, file: Path) -> Tensor:
    match saved:
        case Tensor():
            return saved
        case {"param": Tensor() as value}:
            return value
        case int() | float():
            return torch.tensor(float(saved), dtype=torch.float32)
        case _:
            raise CheckpointError(f"{file}: holds {type(saved).__name__}, expected a tensor")


def _numbers(optimizer: Mapping[str, Any]) -> dict[str, object]:
    """Return the numbers that the optimizer keeps for each parameter: its step."""
    base = optimizer.get("optimizer_state_dict") or optimizer.get("base_optimizer_state") or optimizer
    for state in cast("dict[object, dict[str, object]]", base.get("state", {})).values():
        if "step" in state:
            return {"step": state["step"]}
    return next(({"step": group["step"]} for group in base.get("param_groups", []) if "step" in group), {})
