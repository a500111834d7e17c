"""Coordinates, groups and sizes of a mesh, and the Megatron-style objects that describe one."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.errors import UsageError
from shoal.mesh.mesh import AXES, Mesh, Sizes, adapt
from shoal.mesh.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from shoal.testing import run_ranks


@given(st.tuples(*[st.integers(1, 3)] * 5))
def test_sizes_multiply_to_the_ranks(shape: tuple[int, ...]) -> None:
    given = dict(zip(AXES, shape, strict=True))
    assert Sizes(**given).over(prod(shape)) == shape
    assert Sizes(**(given | {"shard": None})).over(prod(shape)) == shape
    with pytest.raises(UsageError, match="mesh"):
        Sizes(**given).over(prod(shape) + 1)


def test_a_size_that_does_not_fit_says_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"mesh: pipeline 2 x tensor 3 = 6 does not divide the 8 ranks of the job; change a "
                                         r"size, or start a multiple of 6 ranks"):
        Sizes(pipeline=2, tensor=3).over(8)
    with pytest.raises(UsageError, match=r"mesh: pipeline 2 x shard 2 = 4, and the job has 8 ranks; leave shard out"):
        Sizes(pipeline=2, shard=2).over(8)
    with pytest.raises(UsageError, match="mesh: tensor: got 0; an axis has 1 coordinate or more"):
        Sizes(tensor=0)


def look() -> dict[str, Any]:
    mesh = Mesh(pipeline=2, tensor=2)
    total = torch.ones(()) * dist.get_rank()
    dist.all_reduce(total, group=mesh.group("tensor"))
    with pytest.raises(UsageError, match="mesh: got the axis 'data-parallel'; choose among"):
        mesh.rank("data-parallel")
    device_mesh = mesh.device_mesh
    return {"place": mesh.place, "data": mesh.line("data"), "pipeline": mesh.line("pipeline"), "tensor": mesh.line("tensor"),
            "both": mesh.line("data", "tensor"), "stages": mesh.line("data", stages=[0, 1]), "sum": total.item(),
            "world": mesh.group(*AXES) is dist.group.WORLD, "names": device_mesh.mesh_dim_names,
            "their": device_mesh.get_local_rank("tensor"), "model": mesh.get_model_parallel_world_size(),
            "next": mesh.stage_to_global(1), "text": repr(mesh)}


def test_every_rank_has_its_coordinates_and_axis_groups() -> None:
    found = run_ranks(8, look)
    assert [each["place"] for each in found] == [(p, 0, d, 0, t) for p in (0, 1) for d in (0, 1) for t in (0, 1)]
    assert found[5]["data"] == (5, 7) and found[5]["tensor"] == (4, 5) and found[5]["pipeline"] == (1, 5)
    assert found[5]["both"] == (4, 5, 6, 7) and found[5]["stages"] == (1, 3, 5, 7)
    assert [each["sum"] for each in found] == [1, 1, 5, 5, 9, 9, 13, 13]
    assert all(each["world"] and each["names"] == AXES and each["model"] == 4 for each in found)
    assert [each["their"] for each in found] == [0, 1] * 4 and [each["next"] for each in found] == [4, 5, 6, 7] * 2
    assert found[0]["text"] == "Mesh(pipeline=2, replica=1, shard=2, sequence=1, tensor=2)"


def topologies() -> list[Any]:
    one = Mesh.of(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    two = Mesh.of(ProcessTopology(axes=["data", "pipe"], dims=[2, 2]))
    with pytest.raises(UsageError, match="topology: got the axis 'expert'; the axes are pipe, data, model, pipeline"):
        Mesh.of(ProcessTopology(axes=["expert"], dims=[4]))
    return [one.place, two.place, two.line("pipeline"), two.line("data"), Mesh.of(PipeDataParallelTopology(2, 2)).place]


def test_a_topology_may_put_its_axes_in_any_order() -> None:
    assert run_ranks(4, topologies)[2] == [(1, 0, 0, 0, 0), (0, 0, 1, 0, 0), (2, 3), (0, 2), (1, 0, 0, 0, 0)]


class Megatron:
    """The minimal `mpu` of a script: model-parallel ranks are consecutive."""

    def __init__(self, model: int, *, wrong: bool = False):
        self.model, self.wrong = model, wrong

    def get_model_parallel_rank(self) -> int:
        return 0 if self.wrong else dist.get_rank() % self.model

    def get_model_parallel_world_size(self) -> int:
        return self.model

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self.model

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self.model


def adapted() -> list[Any]:
    mesh = adapt(Megatron(2))
    with pytest.raises(UsageError, match=r"mpu: its sizes \(pipeline 1, shard 2, sequence 1, tensor 2\) make 4 coordinates, "
                                         r"of which the 4 ranks of the job fill 2"):
        adapt(Megatron(2, wrong=True))
    with pytest.raises(UsageError, match="initialize: mpu is a tuple without get_data_parallel_rank"):
        adapt((1, 1))  # pyright: ignore[reportArgumentType]
    return [mesh.place, adapt(mesh) is mesh, mesh.size("data")]


def test_a_megatron_style_object_is_a_mesh() -> None:
    assert run_ranks(4, adapted)[3] == [(0, 0, 1, 0, 1), True, 2]


CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def sizes() -> list[Any]:
    found: list[Any] = []
    for config in ({"mesh": {"replica": 2}}, {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
                   {"mesh": {"shard": 4}}, {"mesh": {"sequence": 2}}):
        engine = shoal.initialize(model=nn.Linear(4, 4), config={**CONFIG, **config})[0]
        found.append((engine.mesh.ranks.shape[1:4], engine.train_batch_size(), engine.dp_world_size, engine.mp_world_size))
    with pytest.raises(UsageError, match=r"initialize: the shard axis has 2 ranks by mesh.shard and 4 by "
                                         r"zero_optimization.mics_shard_size; give both the same, or leave one out"):
        shoal.initialize(model=nn.Linear(4, 4), config={**CONFIG, "mesh": {"shard": 2},
                                                        "zero_optimization": {"stage": 1, "mics_shard_size": 4}})
    with pytest.raises(UsageError, match="mesh: tensor 3 = 3 does not divide the 4 ranks"):
        shoal.initialize(model=nn.Linear(4, 4), config={**CONFIG, "mesh": {"tensor": 3}})
    return found


def test_the_configuration_makes_the_mesh() -> None:
    assert run_ranks(4, sizes)[0] == [((2, 2, 1), 4, 4, 1), ((2, 2, 1), 4, 4, 1), ((1, 4, 1), 4, 4, 1), ((1, 2, 2), 2, 2, 2)]
