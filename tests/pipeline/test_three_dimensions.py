"""Pipeline x tensor x data ranks, with any ZeRO stage, train as plain PyTorch does in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.tensor_parallel import Column, Head, Plan, Row, Vocabulary, parallelize
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

from .small import Case, Result, data, train, train_plain
from .test_training import STAGES_PER_RANK, agree

PLAN = Plan({"0.words": Vocabulary(), "*.up": Column(), "*.down": Row(), "5.words": Head()})


@dataclass(frozen=True, kw_only=True)
class Wide(Case):
    """A training case with tensor ranks."""

    tensor: int = 2

    def build(self) -> Any:
        mesh = shoal.Mesh(pipeline=self.stages, tensor=self.tensor)
        model = self.module()
        parallelize(model, mesh.group("tensor"), PLAN, stages=mesh.group("pipeline"))
        return shoal.initialize(model=model, config=self.settings, mpu=mesh)[0]


def trains(cases: list[Wide]) -> list[tuple[Result, tuple[int, ...]]]:
    found: list[tuple[Result, tuple[int, ...]]] = []
    for case in cases:
        engine = case.build()
        losses = [engine.train_batch(data(step, engine.mesh.rank("data"))).item() for step in range(3)]
        norms = [engine.get_global_grad_norm()]
        found.append((Result(losses, norms, engine.consolidated_state_dict(torch.float32) or {}), engine.mesh.place))
    return found


def test_two_by_two_by_two_ranks_train_as_one_process_does() -> None:
    """Train every schedule, and every stage with and without tied weights; test_composition.py trains the other pairs."""
    combinations = (("1f1b", 0, False), ("1f1b", 1, True), ("interleaved", 2, True), ("zb-h1", 3, False),
                    ("zb-h2", 2, False), ("zbv", 3, True), ("gpipe", 1, False), ("gpipe", 0, True))
    cases = [Wide(stages=2, schedule=schedule, stages_per_rank=STAGES_PER_RANK[schedule], zero=zero, tied=tied)
             for schedule, zero, tied in combinations]
    expected = {tied: train_plain(Case(tied=tied), ranks=2) for tied in (False, True)}
    for case, *results in zip(cases, *run_ranks(8, trains, cases), strict=True):
        agree(results[0][0], expected[case.tied], tolerance=3e-6)
        assert all(result.losses == results[0][0].losses for result, _ in results), case


def test_tensor_ranks_alone_train_as_one_process_does() -> None:
    cases = [Wide(stages=1, tensor=4, zero=zero, tied=tied) for zero in (0, 1, 3) for tied in (False, True)]
    cases = [replace(case, tensor=2) for case in cases]
    for case, (result, _) in zip(cases, run_ranks(2, trains, cases)[0], strict=True):
        agree(result, train_plain(case, ranks=1), tolerance=3e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_in_three_dimensions(dtype: str) -> None:
    case = Wide(stages=2, schedule="zbv", stages_per_rank=2, zero=3, dtype=dtype, interval=1)
    expected = train_plain(case, ranks=2)
    result = run_ranks(8, trains, [case])[0][0][0]
    assert result.losses == pytest.approx(expected.losses, rel=4e-2)
    assert result.norms == pytest.approx(expected.norms, rel=0.1)


def saved(case: Wide, folder: str) -> dict[str, Tensor]:
    engine = case.build()
    engine.train_batch(data(0, 0))
    engine.save_checkpoint(folder, tag="one")
    engine.wait_for_checkpoint()
    return engine.consolidated_state_dict(torch.float32) or {}


def loaded(case: Wide, folders: list[str]) -> list[tuple[dict[str, Tensor], float]]:
    """Load each checkpoint into a new engine; return its weights, and the loss of a second step."""
    found: list[tuple[dict[str, Tensor], float]] = []
    for folder in folders:
        engine = case.build()
        engine.load_checkpoint(folder)
        state = engine.consolidated_state_dict(torch.float32) or {}
        found.append((state, engine.train_batch(data(1, 0)).item()))
        engine.destroy()
    return found


def test_checkpoints_move_between_meshes(tmp_path: Path) -> None:
    meshes = {"2 x 2 x 2": (8, Wide(stages=2, zero=3)), "tensor": (2, Wide(stages=1)), "one": (1, Wide(tensor=1)),
              "V": (4, Wide(stages=2, schedule="zbv", stages_per_rank=2, zero=1)), "data": (2, Wide(tensor=1, zero=2))}
    folders = [str(tmp_path / name) for name in meshes]
    weights = [run_ranks(ranks, saved, case, folder)[0]
               for folder, (ranks, case) in zip(folders, meshes.values(), strict=True)]
    found = [run_ranks(ranks, loaded, case, folders)[0] for ranks, case in meshes.values()]
    for number, source in enumerate(meshes):
        for target, results in zip(meshes, found, strict=True):
            state, loss = results[number]
            assert state.keys() == weights[number].keys()
            assert all(torch.equal(state[key], value) for key, value in weights[number].items()), (source, target)
            assert loss == pytest.approx(found[0][number][1], rel=3e-6), (source, target)


def no_parallel_layers() -> str:
    mesh = shoal.Mesh(tensor=2)
    with pytest.raises(shoal.ShoalError) as found:
        shoal.initialize(model=torch.nn.Linear(4, 4), config=Case().settings, mpu=mesh)
    return str(found.value)


def test_tensor_ranks_without_parallel_layers_are_refused() -> None:
    message = run_ranks(2, no_parallel_layers)[0]
    assert "the mesh has 2 tensor ranks, and no layer of the model is sliced over them" in message


def bytes_sent(case: Wide) -> dict[str, int]:
    engine = case.build()
    engine.train_batch(data(0, 0))
    traffic.bytes.clear()
    engine.train_batch(data(1, 0))
    return dict(traffic.bytes)


def test_the_config_alone_can_define_the_mesh() -> None:
    case = Wide(stages=2, config={"mesh": {"pipeline": 2, "tensor": 2}})
    assert run_ranks(4, train, replace(case, config={})) and run_ranks(4, bytes_sent, case)[0]["pipeline"] > 0


def huggingface(config: dict[str, Any]) -> list[float]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    engine, *_ = shoal.initialize(model=model, config={**Case().settings, "gradient_accumulation_steps": 1, **config})
    losses = []
    for step in range(3):
        tokens = torch.randint(0, 30, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_a_known_model_is_parallelized_by_the_config_alone() -> None:
    alone = run_ranks(1, huggingface, {})[0]
    for zero in (0, 3):
        config = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": zero}}
        for losses in run_ranks(4, huggingface, config):
            assert losses == pytest.approx(alone, rel=1e-5)
