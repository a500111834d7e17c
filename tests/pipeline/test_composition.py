"""Every pair of features trains as plain PyTorch in one process; docs/composition.md lists the same pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.tensor_parallel import parallelize
from shoal.testing import run_ranks

from .composition import FEATURES, PAGE, Feature, pairs, settings, table
from .small import LR, Case, Result, data, train_plain
from .test_three_dimensions import PLAN

STEPS = 2


def trained(pair: tuple[Feature, Feature], folder: str) -> Result:
    given = settings(*pair, folder)
    tensor, _ = given.pop("tensor"), given.pop("replicas")
    case = Case(**given)
    replicas = case.config.get("mesh", {}).get("replica", 1)
    mesh = shoal.Mesh(pipeline=case.stages, tensor=tensor, replica=replicas)
    model = case.module()
    if tensor > 1:
        parallelize(model, mesh.group("tensor"), PLAN, stages=mesh.group("pipeline"))
    engine = shoal.initialize(model=model, config=case.settings, mpu=mesh)[0]
    losses = [engine.train_batch(data(step, mesh.rank("data"))).item() for step in range(STEPS)]
    weights = engine.consolidated_state_dict(torch.float32) or {}
    engine.destroy()
    return Result(losses, [], weights)


def train_all(chosen: list[tuple[Feature, Feature]], folder: str) -> list[Result]:
    return [trained(pair, folder) for pair in chosen]


def ranks_of(pair: tuple[Feature, Feature]) -> tuple[int, int]:
    """Return the number of ranks of a pair's training, and of its data ranks."""
    given = settings(*pair, "")
    data_ranks = 2 * given["replicas"]
    return given["stages"] * given["tensor"] * data_ranks, data_ranks


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_every_pair_trains_as_one_process_does(feature: Feature, tmp_path: Any) -> None:
    pairs_of = [pair for pair in pairs() if pair[0] is feature]
    for ranks in sorted({ranks_of(pair)[0] for pair in pairs_of}):
        chosen = [pair for pair in pairs_of if ranks_of(pair)[0] == ranks]
        for pair, result in zip(chosen, run_ranks(ranks, train_all, chosen, str(tmp_path))[0], strict=True):
            check_against_plain(pair, result)


def check_against_plain(pair: tuple[Feature, Feature], result: Result) -> None:
    given = settings(*pair, "")
    plain = Case(tied=given["tied"], clipping=given["clipping"])
    expected = train_plain(plain, ranks_of(pair)[1], STEPS)
    fp32 = given["dtype"] == "fp32"
    names = " and ".join(each.name for each in pair)
    assert result.losses == pytest.approx(expected.losses, rel=3e-6 if fp32 else 4e-2), names
    for name, weight in expected.weights.items():
        close = {"rtol": 3e-6, "atol": 3e-6} if fp32 else {"rtol": 0.05, "atol": 4 * LR}
        assert torch.allclose(result.weights[name], weight, **close), (names, name)


def test_the_page_is_generated_from_the_list() -> None:
    assert PAGE.read_text() == table(), "run: python -m tests.pipeline.composition"
