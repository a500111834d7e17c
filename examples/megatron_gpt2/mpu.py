"""A Megatron-style `mpu`: the ranks that hold slices of one model, and the ranks that hold copies of it.

    model parallel size 2, 6 ranks      [0 1] [2 3] [4 5]      each pair has one model, each rank a part of it
                                        [0 2 4] [1 3 5]        ranks with the same part are data parallel

A script passes this module itself as `mpu`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The two groups that this rank is in."""

    model: dist.ProcessGroup
    data: dist.ProcessGroup


_groups: list[Groups] = []


def initialize_model_parallel(size: int) -> None:
    """Assign each `size` consecutive ranks to one model. A collective. Raises `ValueError` for an indivisible size."""
    world = dist.get_world_size()
    if size < 1 or world % size:
        raise ValueError(f"--model-parallel-size: got {size}; the {world} ranks do not divide by it")
    model = _group([list(range(first, first + size)) for first in range(0, world, size)])
    data = _group([list(range(part, world, size)) for part in range(size)])
    _groups[:] = [Groups(model=model, data=data)]


def get_model_parallel_group() -> dist.ProcessGroup:
    return _groups[0].model


def get_model_parallel_rank() -> int:
    return dist.get_rank(_groups[0].model)


def get_model_parallel_world_size() -> int:
    return dist.get_world_size(_groups[0].model)


def get_data_parallel_group() -> dist.ProcessGroup:
    return _groups[0].data


def get_data_parallel_rank() -> int:
    return dist.get_rank(_groups[0].data)


def get_data_parallel_world_size() -> int:
    return dist.get_world_size(_groups[0].data)


def _group(lines: list[list[int]]) -> dist.ProcessGroup:
    """Create a group of each rank list, in one order on all ranks; return the group that this rank is in."""
    made = [dist.new_group(line) for line in lines]  # other ranks' groups are a number
    return next(group for group in made if isinstance(group, dist.ProcessGroup))
