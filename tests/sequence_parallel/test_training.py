"""Training on a sequence axis is that of one process with whole sequences, on any other axes and ZeRO stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.errors import RanksDisagree, UsageError
from shoal.sequence_parallel import cross_entropy
from shoal.testing import run_ranks

from .small import BLOCK, Case, batch, build, step_of, train, train_plain

CASES = [
    *(Case(zero=zero, sparse=zero % 2 == 0, dropout=0.1 * (zero == 2)) for zero in range(4)),
    Case(zero=3, recompute=True, dropout=0.1), Case(zero=1, dtype="bf16"),
    *(Case(sequence=4, zero=zero) for zero in (0, 3)), Case(sequence=4, zero=2, sparse=False),
    *(Case(tensor=2, zero=zero, dropout=0.1) for zero in (1, 3)), *(Case(pipeline=2, zero=zero) for zero in (0, 1)),
    Case(data=2, zero=3), Case(data=2, zero=2, replica=2),
    Case(tensor=2, pipeline=2, zero=1), Case(pipeline=2, data=2, zero=2, sparse=False),
]  # fmt: skip


def train_all(cases: list[Case]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(case) for case in cases]


@pytest.mark.parametrize("ranks", sorted({case.ranks for case in CASES}))
def test_a_sequence_axis_trains_as_one_process_does(ranks: int) -> None:
    cases = [case for case in CASES if case.ranks == ranks]
    for case, *results in zip(cases, *run_ranks(ranks, train_all, cases), strict=True):
        losses, weights = train_plain(replace(case, recompute=False))
        close = {"rtol": 3e-5, "atol": 1e-5} if case.dtype == "fp32" else {"rtol": 0.05, "atol": 4e-2}
        for theirs, _ in results:
            assert theirs == pytest.approx(losses, rel=1e-5 if case.dtype == "fp32" else 2e-2), case
        for name, value in weights.items():
            assert torch.allclose(results[0][1][name], value, **close), (case, name)


def joined(case: Case) -> dict[str, Tensor]:
    """Train until the data of both data ranks has ended, of which the second has less."""
    engine = build(case)
    data_rank = engine.mesh.rank("data")
    with engine.join():
        for number in range(4 - 2 * data_rank):
            part = engine.split_sequence(batch(0, data_rank, number), multiple=BLOCK)
            logits = engine(part["input_ids"], part["position_ids"])
            engine.backward(cross_entropy(logits, part["shift_labels"], engine.sequence))
            engine.step()
    return engine.consolidated_state_dict(torch.float32) or {}


def test_ranks_of_a_sequence_whose_data_ends_join_the_others() -> None:
    whole, split = (run_ranks(2 * size, joined, Case(sequence=size, data=2, zero=2))[0] for size in (1, 2))
    for name, value in whole.items():
        torch.testing.assert_close(split[name], value, rtol=3e-5, atol=1e-5)


def saved(case: Case, folder: str) -> dict[str, Tensor]:
    engine = build(case)
    step_of(engine, case, 0)
    engine.save_checkpoint(folder, tag="one")
    engine.wait_for_checkpoint()
    return engine.consolidated_state_dict(torch.float32) or {}


def loaded(case: Case, folders: list[str]) -> list[tuple[dict[str, Tensor], float]]:
    """Load each checkpoint into a new engine; return its weights, and the loss of the next step."""
    found: list[tuple[dict[str, Tensor], float]] = []
    for folder in folders:
        engine = build(case)
        engine.load_checkpoint(folder)
        state = engine.consolidated_state_dict(torch.float32) or {}
        found.append((state, step_of(engine, case, 1)))
        engine.destroy()
    return found


def test_checkpoints_load_on_other_sequence_sizes(tmp_path: Path) -> None:
    meshes = {"one": Case(sequence=1), "two": Case(zero=3), "four": Case(sequence=4, zero=1),
              "tensor": Case(tensor=2, zero=2)}
    folders = [str(tmp_path / name) for name in meshes]
    weights = [run_ranks(case.ranks, saved, case, folder)[0] for folder, case in zip(folders, meshes.values(), strict=True)]
    found = [run_ranks(case.ranks, loaded, case, folders)[0] for case in meshes.values()]
    for number, source in enumerate(meshes):
        for target, results in zip(meshes, found, strict=True):
            state, loss = results[number]
            assert all(torch.equal(state[key], value) for key, value in weights[number].items()), (source, target)
            assert loss == pytest.approx(found[0][number][1], rel=1e-5), (source, target)


def unequal_parts() -> str:
    engine = build(Case())
    length = 64 if engine.mesh.rank("sequence") else 48
    with pytest.raises(RanksDisagree) as found:
        engine(torch.zeros(2, length, dtype=torch.int64), torch.zeros(2, length, dtype=torch.int64))
    return str(found.value)


def test_parts_of_unequal_length_are_refused_before_a_forward() -> None:
    assert "forward: rank 0 of the sequence axis got a batch of" in run_ranks(2, unequal_parts)[0]


def wrong_sizes() -> list[str]:
    said: list[str] = []
    for other in ({"mesh": {"sequence": 1}}, {"data_parallel_size": 2}):
        config = {"sequence_parallel_size": 2, **other}
        with pytest.raises(UsageError) as found:
            shoal.initialize(model=torch.nn.Linear(2, 2), config=Case().settings | config)
        said.append(str(found.value))
    return said


def test_sizes_of_the_sequence_axis_must_fit() -> None:
    twice, data = run_ranks(2, wrong_sizes)[0]
    assert "the sequence axis has 1 ranks by mesh.sequence and 2 by sequence_parallel_size" in twice
    assert "2 data ranks are asked for (data_parallel_size or mesh_param)" in data


def configured(config: dict[str, Any], mesh_param: Any = None) -> tuple[str, dict[str, int], int]:
    engine = shoal.initialize(model=torch.nn.Linear(2, 2), config=Case().settings | config, mesh_param=mesh_param)[0]
    mesh = engine.mesh
    return str(mesh), {"rank": mesh.get_sequence_parallel_rank(), "ranks": mesh.get_sequence_parallel_world_size(),
                       "both": mesh.get_sequence_data_parallel_world_size(), "shards": engine.parameter_groups.state_shards
                       }, engine.train_batch_size()


def test_published_keys_and_arguments_make_a_sequence_axis() -> None:
    for config, mesh_param in (({"sequence_parallel_size": 2}, None), ({"mesh": {"sequence": 2}}, None), ({}, (2, 2)),
                               ({"sequence_parallel_size": 2, "data_parallel_size": 2}, None)):
        mesh, facts, samples = run_ranks(4, configured, config, mesh_param)[3]
        assert mesh == "Mesh(pipeline=1, replica=1, shard=2, sequence=2, tensor=1)"
        assert facts == {"rank": 1, "ranks": 2, "both": 4, "shards": 4} and samples == 8


class Mpu:
    """A published object with a sequence axis: no model axis, and data ranks that see different samples."""

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank() // 2

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_sequence_parallel_rank(self) -> int:
        return torch.distributed.get_rank() % 2

    def get_sequence_parallel_world_size(self) -> int:
        return 2


def adapted() -> str:
    return str(shoal.initialize(model=torch.nn.Linear(2, 2), config=Case().settings, mpu=Mpu())[0].mesh)


def test_the_sequence_axis_of_an_mpu_is_taken() -> None:
    assert run_ranks(4, adapted)[0] == "Mesh(pipeline=1, replica=1, shard=2, sequence=2, tensor=1)"


class Counted(torch.nn.Module):
    """A module with a buffer that ranks begin with different values of."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor(float(value)))


def buffer() -> float:
    engine = shoal.initialize(model=Counted(torch.distributed.get_rank()), config=Case().settings
                              | {"sequence_parallel_size": 2})[0]
    return engine.module.count.item()


def test_all_parts_of_a_sequence_begin_with_the_same_buffers() -> None:
    assert run_ranks(2, buffer) == [0.0, 0.0]
