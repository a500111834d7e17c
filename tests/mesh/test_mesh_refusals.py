"""Invalid meshes, marks of Megatron-style layers and batches of tensor ranks are refused, and the error names the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.errors import RanksDisagree, ShoalError, UsageError
from shoal.mesh.mesh import Sizes, adapt
from shoal.tensor_parallel import ColumnLinear, RowLinear
from shoal.testing import run_ranks

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "timeout": 30,
                          "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def told(call: Callable[[], object], kind: type[ShoalError] = UsageError) -> str:
    with pytest.raises(kind) as found:
        call()
    return str(found.value)


@pytest.mark.parametrize("size", ["2", 2.5, None, True])
def test_a_size_is_a_whole_number(size: Any) -> None:
    with pytest.raises(UsageError, match=r"mesh: pipeline: got .*; give a whole number of coordinates" if size is not None
                       else r"mesh: shard 1 = 1, and the job has 2 ranks; leave shard out .*, or start 1 ranks"):
        Sizes(pipeline=size) if size is not None else Sizes(shard=1).over(2)


class Parts:
    """A Megatron-style `mpu` of two tensor ranks, optionally with other sizes on rank 1."""

    def __init__(self, *, other: bool = False):
        self.data = 2 if other and dist.get_rank() == 1 else 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return self.data

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return 2


def marked(dim: Any) -> nn.Module:
    layer = nn.Linear(8, 4, bias=False)
    vars(layer.weight).update(tensor_model_parallel=True, partition_dim=dim)
    return layer


def two_tensor_ranks() -> list[str]:
    rank = dist.get_rank()
    said = [told(lambda dim=dim: shoal.initialize(model=marked(dim), mpu=Parts(), config=CONFIG)) for dim in (-1, 5, "x")]
    said.append(told(lambda: adapt(Parts(other=True))))
    pipeline = shoal.PipelineModule([shoal.LayerSpec(nn.Linear, 8, 8)], num_stages=1, loss_fn=nn.functional.mse_loss)
    said.append(told(lambda: shoal.initialize(model=pipeline, config={**CONFIG, "mesh": {"tensor": 2}})))
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)

    def engine() -> Any:
        model = nn.Sequential(ColumnLinear(8, 16, group), nn.ReLU(), RowLinear(16, 8, group))
        return shoal.initialize(model=model, config={**CONFIG, "mesh": {"tensor": 2}})[0]

    said.append(told(lambda: engine()(torch.full((2, 8), float(rank))), RanksDisagree))
    said.append(told(lambda: engine()(torch.zeros(2 + rank, 8)), RanksDisagree))
    assert torch.equal(engine()(torch.ones(2, 8)), engine()(torch.ones(2, 8))) is False  # other weights, one batch
    said.append(told(lambda: RowLinear(16, 8, group)(torch.zeros(2, 16))))
    return said


def test_two_tensor_ranks_get_errors_that_name_the_mismatch() -> None:
    for said in run_ranks(2, two_tensor_ranks):
        for text, words in zip(said, (
            "'weight' is marked as sliced over the tensor ranks along partition_dim -1, and its part here is (4, 8); give "
            "it the dim that is sliced, 0 to 1",
            "along partition_dim 5,", "along partition_dim 'x',",
            "mpu: rank 0 says {'pipeline': (0, 1), 'shard': (0, 1), 'sequence': (0, 1), 'tensor': (0, 2)}, rank 1 says "
            "{'pipeline': (0, 1), 'shard': (0, 2), 'sequence': (0, 1), 'tensor': (1, 2)}; all ranks must see the same sizes",
            "no layer of the PipelineModule is sliced over them: before initialize call shoal.tensor_parallel.parallelize("
            "model, mesh.group('tensor'), plan, stages=mesh.group('pipeline'))",
            "forward: rank 0 of the tensor axis got a batch of (2, 8) float32, and rank 1 another batch of the same shape; "
            "give all tensor ranks the same samples",
            "got a batch of (2, 8) float32, and rank 1 a batch of (3, 8) float32",
            "RowLinear: got an input of 16 features, and this rank's part is 8 of 16; let a column layer come before it",
        ), strict=True):
            assert words in text


def pipelines() -> list[str]:
    make: Any = shoal.PipelineModule
    layers = [shoal.LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
    built = make(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    return [told(lambda: make(layers, num_stages=2.0)), told(lambda: make(layers, num_stages=3)),
            told(lambda: make([*layers, shoal.LayerSpec(nn.Linear, 8)], num_stages=2)),
            told(lambda: shoal.initialize(model=built, config={**CONFIG, "pipeline": {"schedule": "zbv"}})),
            told(lambda: shoal.PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp="x"))]  # type: ignore[arg-type]


def test_invalid_uses_of_a_pipeline_module_are_refused() -> None:
    for said in run_ranks(2, pipelines):
        for text, words in zip(said, (
            "num_stages: got 2.0; give a whole number of pipeline ranks",
            "num_stages: got 3; the 2 ranks of the job do not divide by it: give one of 1, 2, or start a multiple of 3",
            "layers: '4' (Linear): Linear(8) cannot be built: TypeError: ",
            "pipeline.schedule: got 'zbv'; the module was built for '1f1b', with 1 stages on each rank: pass "
            "schedule='zbv' to PipelineModule",
            "topology: got 'x' among dims [1, 'x', 2]",
        ), strict=True):
            assert words in text


def configured() -> list[str]:
    meshes = [shoal.configured_mesh({**CONFIG, **keys}) for keys in (
        {}, {"mesh": {"pipeline": 2}}, {"pipeline": {"stages": 2}, "mesh": {"tensor": 2}},
        {"tensor_parallel": {"autotp_size": 2}}, {"mesh": {"shard": 2}})]
    wrong = [told(lambda keys=keys: shoal.configured_mesh({**CONFIG, **keys}), ShoalError) for keys in (
        {"mesh": {"pipe": 2}}, {"mesh": [2]}, {"mesh": {"tensor": 3}},
        {"mesh": {"tensor": 2}, "tensor_parallel": {"autotp_size": 4}})]
    return [*map(str, meshes), *wrong]


def test_a_script_gets_the_mesh_of_its_configuration_before_initialize() -> None:
    for text, words in zip(run_ranks(4, configured)[3], (
        "Mesh(pipeline=1, replica=1, shard=4, sequence=1, tensor=1)", "Mesh(pipeline=2, replica=1, shard=2",
        "Mesh(pipeline=2, replica=1, shard=1, sequence=1, tensor=2)", "shard=2, sequence=1, tensor=2)",
        "Mesh(pipeline=1, replica=2, shard=2", "mesh.pipe: unknown key; did you mean 'pipeline'?", "mesh: got [2]; give a",
        "mesh: tensor 3 = 3 does not divide the 4 ranks", "tensor axis has 2 ranks by mesh.tensor and 4 by",
    ), strict=True):
        assert words in text
