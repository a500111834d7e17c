"""A checkpoint of any topology loads into any other, and training continues with the same losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.testing import run_ranks

from .small import Case, Result, data, layers, loss_fn, train

TOPOLOGIES = {
    "one rank": (1, Case(stages=1)),
    "two data ranks, ZeRO 3": (2, Case(stages=1, zero=3)),
    "two stages": (2, Case(stages=2)),
    "two stages x two data ranks, ZeRO 2": (4, Case(stages=2, zero=2)),
    "three stages, ZeRO 1": (3, Case(stages=3, zero=1)),
    "V of four stages, ZeRO 3": (2, Case(stages=2, schedule="zbv", stages_per_rank=2, zero=3)),
    "two copies of two shards, ZeRO 3": (4, Case(stages=1, zero=3, config={"mesh": {"shard": 2}})),
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint after two steps: its folder, its weights, and the third step of the run that saved it."""

    folder: str
    weights: dict[str, Tensor]
    next: Result


def train_and_save(case: Case, folder: str) -> Saved:
    """Train two steps with the same samples on every data rank, save, and train a third."""
    engine = shoal.initialize(model=case.module(), config=case.settings)[0]
    for step in range(2):
        engine.train_batch(data(step, 0))
    engine.save_checkpoint(folder, tag="two")
    engine.wait_for_checkpoint()
    weights = engine.consolidated_state_dict(torch.float32) or {}
    return Saved(folder, weights, third_step(engine))


def third_step(engine: shoal.PipelineEngine) -> Result:
    losses = [engine.train_batch(data(2, 0)).item()]
    return Result(losses, [], engine.consolidated_state_dict(torch.float32) or {})


def resumed(case: Case, folders: list[str]) -> list[tuple[dict[str, Tensor], Result]]:
    """Load each checkpoint into a new engine; return its weights and its third step."""
    found: list[tuple[dict[str, Tensor], Result]] = []
    for folder in folders:
        engine = shoal.initialize(model=case.module(), config=case.settings)[0]
        path, _ = engine.load_checkpoint(folder)
        assert path is not None and engine.global_steps == 2
        found.append((engine.consolidated_state_dict(torch.float32) or {}, third_step(engine)))
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    """Return one checkpoint of every topology."""
    folder = tmp_path_factory.mktemp("saved")
    return [run_ranks(ranks, train_and_save, case, str(folder / str(number)))[0]
            for number, (ranks, case) in enumerate(TOPOLOGIES.values())]


@pytest.mark.parametrize("target", TOPOLOGIES)
def test_a_topology_loads_the_checkpoints_of_all_others(target: str, checkpoints: list[Saved]) -> None:
    ranks, case = TOPOLOGIES[target]
    found = run_ranks(ranks, resumed, case, [saved.folder for saved in checkpoints])[0]
    for name, saved, (weights, after) in zip(TOPOLOGIES, checkpoints, found, strict=True):
        assert weights.keys() == saved.weights.keys(), name
        assert all(torch.equal(weights[key], weight) for key, weight in saved.weights.items()), name
        assert after.losses == pytest.approx(saved.next.losses, rel=2e-6), name
        for key, weight in saved.next.weights.items():
            assert torch.allclose(after.weights[key], weight, rtol=1e-5, atol=2e-6), (name, key)


class Plain(nn.Module):
    """The same model without a pipeline, under the same names."""

    def __init__(self) -> None:
        super().__init__()
        first, *blocks, last = (spec.build() for spec in layers())
        self.embed, self.blocks, self.head = first, nn.ModuleList(blocks), last
        self.head.words.weight = self.embed.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain(folder: str) -> dict[str, Tensor]:
    engine = shoal.initialize(model=Plain(), config=Case().settings)[0]
    for tokens, labels in data(0, 0):
        engine.backward(loss_fn(engine(tokens), labels))
        engine.step()
    engine.save_checkpoint(folder, tag="plain")
    engine.wait_for_checkpoint()
    return engine.consolidated_state_dict() or {}


def named(folder: str) -> dict[str, Tensor]:
    first, *blocks, last = layers()
    names = {"embed": first, **{f"blocks.{number}": block for number, block in enumerate(blocks)}, "head": last}
    module = shoal.PipelineModule(names, num_stages=2, loss_fn=loss_fn)
    engine = shoal.initialize(model=module, config=Case(zero=1).settings)[0]
    engine.load_checkpoint(folder)
    return engine.consolidated_state_dict() or {}


def test_a_pipeline_with_a_plain_models_names_loads_its_checkpoint(tmp_path: Path) -> None:
    saved = run_ranks(2, plain, str(tmp_path))[0]
    loaded = run_ranks(4, named, str(tmp_path))[0]
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], weight) for name, weight in saved.items())


def plain_state(case: Case) -> tuple[bool, float]:
    """Load a plain state dict, and train one step."""
    torch.manual_seed(7)
    source = {f"{number}.{name}": tensor for number, spec in enumerate(layers())
              for name, tensor in spec.build().state_dict().items()}
    source["5.words.weight"] = source["0.words.weight"]
    engine = shoal.initialize(model=case.module(), config=case.settings)[0]
    engine.load_module_state_dict(source)
    state = engine.consolidated_state_dict()
    return state is None or all(torch.equal(state[name], tensor) for name, tensor in source.items()), \
        engine.train_batch(data(0, 0)).item()


def test_a_plain_state_dict_loads_into_any_topology() -> None:
    found = [run_ranks(ranks, plain_state, case)[0] for ranks, case in TOPOLOGIES.values()]
    assert all(same for same, _ in found)
    assert [loss for _, loss in found] == pytest.approx([found[0][1]] * len(found), rel=2e-6)


def test_a_mesh_in_the_config_trains_as_num_stages_alone() -> None:
    case = Case(stages=2)
    configured = replace(case, config={"mesh": {"pipeline": 2}})
    assert run_ranks(2, train, configured)[0].losses == run_ranks(2, train, case)[0].losses
