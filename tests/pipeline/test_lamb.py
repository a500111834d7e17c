"""LAMB uses the norms of whole parameters, however pipeline, tensor and data ranks shard them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.optim import Lamb
from shoal.tensor_parallel import parallelize
from shoal.testing import run_ranks

from .small import Result, data, train_plain
from .test_three_dimensions import PLAN, Wide
from .test_training import agree

PARAMS: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.1, "max_coeff": 0.9, "min_coeff": 0.05}
CONFIG: dict[str, Any] = {"optimizer": {"type": "Lamb", "params": PARAMS}}


def build(case: Wide) -> shoal.Engine:
    replicas = case.config.get("mesh", {}).get("replica", 1)
    mesh = shoal.Mesh(pipeline=case.stages, tensor=case.tensor, replica=replicas)
    model = case.module()
    if case.tensor > 1:
        parallelize(model, mesh.group("tensor"), PLAN, stages=mesh.group("pipeline"))
    return shoal.initialize(model=model, config=case.settings, mpu=mesh)[0]


def trained(engine: Any, steps: range) -> tuple[Result, dict[str, float]]:
    losses = [engine.train_batch(data(step, engine.mesh.rank("data"))).item() for step in steps]
    said = engine.parameter_groups.world.gather_objects(dict(engine.optimizer.coefficients))
    coefficients: dict[str, float] = {}
    for each in said:
        for name, coefficient in each.items():
            assert coefficients.setdefault(name, coefficient) == coefficient, "equal bits on every rank of a parameter"
    state = engine.consolidated_state_dict(torch.float32) or {}
    return Result(losses, [engine.get_global_grad_norm()], state), coefficients


def trains(cases: list[Wide]) -> list[tuple[Result, dict[str, float]]]:
    return [trained(build(case), range(3)) for case in cases]


def plain(case: Wide, ranks: int) -> tuple[Result, list[float]]:
    made: list[Lamb] = []

    def make(parameters: Iterable[Tensor]) -> Lamb:
        made.append(Lamb(parameters, **PARAMS))
        return made[0]

    return train_plain(case, ranks, make=make), made[0].lamb_coeffs


@pytest.mark.parametrize(("ranks", "data_ranks", "cases"), [
    (2, 1, [Wide(stages=1, zero=zero, tied=tied, config=CONFIG) for zero, tied in ((0, False), (1, True))]),
    (4, 2, [Wide(stages=1, zero=zero, tied=tied, config=CONFIG) for zero, tied in ((1, False), (3, True))]),
    (4, 2, [Wide(stages=2, tensor=1, zero=zero, config=CONFIG) for zero in (0, 3)]),
    (4, 4, [Wide(stages=1, tensor=1, zero=zero, config={**CONFIG, "mesh": {"replica": 2}}) for zero in (1, 3)]),
    (4, 1, [Wide(stages=2, schedule="zbv", stages_per_rank=2, config=CONFIG), Wide(stages=2, zero=1, config=CONFIG)]),
], ids=["tensor", "tensor x data", "pipeline x data", "replica x shard", "pipeline x tensor"])
def test_lamb_on_every_mesh_steps_as_one_process_does(ranks: int, data_ranks: int, cases: list[Wide]) -> None:
    for case, (found, coefficients) in zip(cases, run_ranks(ranks, trains, cases)[0], strict=True):
        expected, ratios = plain(case, data_ranks)
        agree(found, expected, tolerance=5e-6)
        assert sorted(coefficients.values()) == pytest.approx(sorted(ratios), rel=1e-4), case


def saved(case: Wide, folder: str) -> Result:
    engine: Any = build(case)
    trained(engine, range(3))
    engine.save_checkpoint(folder, tag="one")
    engine.wait_for_checkpoint()
    return trained(engine, range(3, 5))[0]


def resumed(case: Wide, folder: str) -> Result:
    engine: Any = build(case)
    engine.load_checkpoint(folder)
    return trained(engine, range(3, 5))[0]


def test_a_lamb_checkpoint_resumes_on_another_mesh(tmp_path: Path) -> None:
    case = Wide(stages=1, tensor=2, zero=0, config=CONFIG)
    rest = run_ranks(2, saved, case, str(tmp_path))[0]
    assert run_ranks(2, resumed, case, str(tmp_path))[0].losses == rest.losses
    agree(run_ranks(1, resumed, replace(case, tensor=1, zero=2), str(tmp_path))[0], rest, tolerance=5e-6)
