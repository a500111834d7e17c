"""DeepSpeed's universal form: one folder for each parameter, with its master and moments as whole tensors.

    DIR/TAG/zero/NAME/fp32.pt, exp_avg.pt, ...    a tensor, or {"param": tensor}
    DIR/TAG/zero/optimizer_state.pt               the values of the optimizer: its groups and their options
    DIR/TAG/*mp_rank_*_model_states.pt            counters, buffers, frozen parameters and the client's state
    DIR/latest_universal                          the tag
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.interchange.archive import integer, load_archive
from shoal.interchange.contents import ForeignCheckpoint
from shoal.interchange.layout import Files
from shoal.interchange.reader import add_frozen_slices, add_module, add_numbers, shared_values

__all__ = ["is_universal", "read_universal"]

ZERO = "zero"
OPTIMIZER = "optimizer_state.pt"
MASTER = "fp32"


def is_universal(path: Path) -> bool:
    """Return whether the folder holds the universal form."""
    return (path / ZERO).is_dir()


def read_universal(path: Path) -> ForeignCheckpoint:
    """Return the contents of the universal checkpoint in the folder `path`. Raises CheckpointError if it is incomplete."""
    files = Files.find(path)
    if not files.model:
        raise CheckpointError(f"{path}: has no model file, so its counters and buffers are missing")
    stages = {number: {rank: cast("dict[str, Any]", load_archive(file)) for rank, file in ranks.items()}
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
    contents.shared["tied"] = tied
    contents.shared["parameters"] = contents.parameters()
    return contents


def _tensor(saved: object, file: Path) -> Tensor:
    match saved:
        case Tensor():
            return saved
        case {"param": Tensor() as value}:
            return value
        case int() | float():
            return torch.tensor(float(saved))
        case _:
            raise CheckpointError(f"{file}: holds {type(saved).__name__}, expected a tensor")


def _numbers(optimizer: Mapping[str, Any]) -> dict[str, object]:
    """Return the numbers that the optimizer keeps for each parameter: its step."""
    base = optimizer.get("optimizer_state_dict") or optimizer.get("base_optimizer_state") or optimizer
    for state in cast("dict[object, dict[str, object]]", base.get("state", {})).values():
        if "step" in state:
            return {"step": state["step"]}
    return next(({"step": group["step"]} for group in base.get("param_groups", []) if "step" in group), {})
