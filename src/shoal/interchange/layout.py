"""The facts of DeepSpeed's checkpoint folders: which file a rank writes, and which elements of a parameter it holds.

    stage 0      DIR/TAG/mp_rank_MM_model_states.pt                           weights and the optimizer
    stages 1, 2  the same file, without the optimizer
                 DIR/TAG/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt     rank D's part of the flat groups
    stage 3      DIR/TAG/zero_pp_rank_D_mp_rank_MM_model_states.pt            buffers and frozen parameters
                 DIR/TAG/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt     rank D's part of each parameter
    pipeline     DIR/TAG/layer_LL-model_states.pt                             the weights of one layer; MM is the stage

At stages 1 and 2 the parameters of one optimizer group lie one behind the other in one flat buffer, which is padded to a
multiple of `2 * ranks` and cut into equal parts. At stage 3 each parameter is padded to a multiple of the ranks and cut
into equal parts, and the parts of one rank lie one behind the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from shoal.errors import CheckpointError

__all__ = ["HYPERPARAMETERS", "RESERVED", "Files", "Fragment", "flat_fragments", "has_deepspeed_files", "model_file",
           "optimizer_file", "sliced_fragments"]

Shape = tuple[int, ...]

ALIGNMENT = 2
"""A flat group is padded to a multiple of this many elements for each rank."""

RESERVED = frozenset({
    "buffer_names", "checkpoint_parallel_dimensions", "data_sampler", "dp_world_size", "ds_config", "ds_version",
    "frozen_param_fragments", "frozen_param_shapes", "global_samples", "global_steps", "lr_scheduler", "module",
    "mp_world_size", "optimizer", "param_shapes", "random_ltd", "shared_params", "skipped_steps",
    "sparse_tensor_module_names", "csr_tensor_module_names"})
"""The keys of a model file that are not the client's state."""

HYPERPARAMETERS = frozenset({
    "alpha", "amsgrad", "betas", "centered", "dampening", "decoupled_weight_decay", "eps", "initial_lr", "lr", "lr_decay",
    "max_coeff", "maximize", "min_coeff", "momentum", "nesterov", "rho", "weight_decay"})
"""Options of an optimizer group that say what a step computes; the others choose an implementation."""

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<data>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d+)-model_states\.pt")
_FOREIGN = re.compile(r"layer_\d+-model_\d+-model_states\.pt|.*expert.*\.pt|expp_rank_.*\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of one checkpoint: by pipeline stage, and within it by data rank."""

    model: dict[int, dict[int, Path]]
    optimizer: dict[int, dict[int, Path]]
    layers: dict[int, Path]

    @classmethod
    def find(cls, path: Path) -> Files:
        """List the files of the folder `path`. Raises CheckpointError for files of a kind that is not read."""
        model: dict[int, dict[int, Path]] = {}
        optimizer: dict[int, dict[int, Path]] = {}
        layers: dict[int, Path] = {}
        for file in sorted(path.iterdir()):
            if found := _MODEL.fullmatch(file.name):
                model.setdefault(int(found["model"]), {})[int(found["data"] or 0)] = file
            elif found := _OPTIMIZER.fullmatch(file.name):
                optimizer.setdefault(int(found["model"]), {})[int(found["data"])] = file
            elif found := _LAYER.fullmatch(file.name):
                layers[int(found["layer"])] = file
            elif _FOREIGN.fullmatch(file.name):
                raise CheckpointError(f"{file}: a part of a tensor-parallel layer or of an expert, which is not read; "
                                      "convert the checkpoint with DeepSpeed's ds_to_universal, and load that")
        for number, files in optimizer.items():
            if sorted(files) != list(range(len(files))):
                missing = next(rank for rank in range(max(files)) if rank not in files)
                raise CheckpointError(f"{path}: the optimizer file of data rank {missing} of model rank {number} is "
                                      "missing; a checkpoint needs the files of all ranks in one folder")
        return cls(model=model, optimizer=optimizer, layers=layers)


def has_deepspeed_files(path: Path) -> bool:
    """Return whether the folder holds a checkpoint of DeepSpeed, universal or not."""
    return any(path.glob("*mp_rank_*_model_states.pt"))


def model_file(stage: int, rank: int) -> str:
    """Return the name of the model file of a data rank."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"


def optimizer_file(rank: int, *, bf16: bool) -> str:
    """Return the name of the optimizer file of a data rank."""
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """Elements [start, start + count) of a parameter, which one rank holds from element `at` of its flat buffer."""

    name: str
    shape: Shape
    start: int
    at: int
    count: int


def flat_fragments(shapes: Mapping[str, Sequence[int]], ranks: int) -> list[list[Fragment]]:
    """Return for each rank its fragments of one group at stages 1 and 2."""
    width = flat_part(shapes, ranks)
    parts: list[list[Fragment]] = [[] for _ in range(ranks)]
    first = 0
    for name, shape in shapes.items():
        end = first + prod(shape)
        for rank in range(first // width if width else 0, ranks):
            low, high = max(first, rank * width), min(end, (rank + 1) * width)
            if low < high:
                parts[rank].append(Fragment(name=name, shape=tuple(shape), start=low - first, at=low - rank * width,
                                            count=high - low))
        first = end
    return parts


def flat_part(shapes: Mapping[str, Sequence[int]], ranks: int) -> int:
    """Return the elements of one rank's part of a group at stages 1 and 2, padding included."""
    multiple = ALIGNMENT * ranks
    return -(-sum(prod(shape) for shape in shapes.values()) // multiple) * multiple // ranks


def sliced_fragments(shapes: Mapping[str, Sequence[int]], ranks: int) -> Iterator[list[Fragment]]:
    """Yield for each rank its fragments of some parameters at stage 3; `count` excludes padding, which `at` includes."""
    for rank in range(ranks):
        parts: list[Fragment] = []
        at = 0
        for name, shape in shapes.items():
            width = -(-prod(shape) // ranks)
            count = max(0, min(prod(shape), (rank + 1) * width) - rank * width)
            parts.append(Fragment(name=name, shape=tuple(shape), start=min(rank * width, prod(shape)), at=at, count=count))
            at += width
        yield parts
