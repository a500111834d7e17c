"""What modules return from `get_extra_state` is saved and loaded with the model, as torch's `state_dict` does."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.checkpoint import export, read
from shoal.engine.engine import Engine
from shoal.errors import CheckpointError, UsageError
from shoal.testing import run_ranks

STATES = ["0._extra_state", "1._extra_state"]
AdamW = {"type": "AdamW", "params": {"lr": 1e-2}}


class Scaled(nn.Module):
    """A layer that remembers the largest inputs of its calls, as layers in fp8 do."""

    def __init__(self, history: Any = None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.history: Any = {"largest": [], "of_last": torch.zeros(())} if history is None else history

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state

    def forward(self, x: Tensor) -> Tensor:
        largest = x.detach().abs().max()
        self.history = {"largest": [*self.history["largest"], largest.item()], "of_last": largest}
        return self.linear(x)


def build(stage: int = 0, layers: int = 2, **config: Any) -> Engine:
    torch.manual_seed(0)
    module = nn.Sequential(*(Scaled() for _ in range(layers)))
    return shoal.initialize(model=module, config={"train_micro_batch_size_per_gpu": 2, "optimizer": AdamW, "timeout": 20,
                                                  "zero_optimization": {"stage": stage}, **config})[0]


def train(engine: Engine) -> None:
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()


def histories(engine: Engine) -> list[Any]:
    return [layer.history for layer in engine.module.modules() if isinstance(layer, Scaled)]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def save_and_load(folder: str, stage: int, layout: str) -> None:
    engine = build(stage, checkpoint={"layout": layout})
    train(engine)
    engine.save_checkpoint(folder)
    expected = histories(engine)
    assert len(expected[0]["largest"]) == 3
    train(engine)  # what a save has copied does not follow
    engine.wait_for_checkpoint()
    if layout != "shoal" and engine.global_rank == 0:  # of DeepSpeed's files alone
        for file in Path(folder).glob("*/*.safetensors"):
            file.unlink()
        for file in Path(folder).glob("*/*.json"):
            file.unlink()
    engine.communicator.gather_objects("removed")
    for only in (False, True):
        other = build(3 - stage)
        other.load_checkpoint(folder, load_module_only=only)
        assert all(map(equal, histories(other), expected))


@pytest.mark.parametrize(("stage", "layout"), [(0, "shoal"), (1, "shoal"), (2, "deepspeed"), (3, "deepspeed")])
def test_a_checkpoint_holds_extra_state(tmp_path: Path, stage: int, layout: str) -> None:
    run_ranks(2, save_and_load, str(tmp_path), stage, layout)


def save_and_load_in_a_pipeline(folder: str) -> None:
    def engine() -> Any:
        torch.manual_seed(0)
        module = shoal.PipelineModule([Scaled(), Scaled()], num_stages=2, loss_fn=nn.MSELoss())
        return shoal.initialize(model=module, config={
            "train_micro_batch_size_per_gpu": 2, "optimizer": AdamW, "timeout": 20})[0]

    first = engine()
    first.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))]))
    first.save_checkpoint(folder)
    first.wait_for_checkpoint()
    mine = next(layer for layer in first.module.modules() if isinstance(layer, Scaled)).history
    second = engine()
    second.load_checkpoint(folder)
    loaded = next(layer for layer in second.module.modules() if isinstance(layer, Scaled)).history
    assert len(mine["largest"]) == 1 and equal(loaded, mine)
    state = second.consolidated_state_dict()
    assert state is None or len([name for name in state if name.endswith("_extra_state")]) == 2


def test_each_pipeline_stage_has_its_own_back(tmp_path: Path) -> None:
    run_ranks(2, save_and_load_in_a_pipeline, str(tmp_path))


@pytest.mark.parametrize("stage", [0, 3])
def test_state_dicts_hold_extra_state_as_plain_ones_do(stage: int) -> None:
    engine = build(stage)
    train(engine)
    state = engine.consolidated_state_dict()
    assert state is not None
    assert sorted(state) == sorted(nn.Sequential(Scaled(), Scaled()).state_dict())
    other = build(stage)
    other.load_module_state_dict(state)
    assert all(map(equal, histories(other), histories(engine)))
    del state[STATES[0]]
    with pytest.raises(UsageError, match=f"load_module_state_dict: {STATES[0]}: missing"):
        other.load_module_state_dict(state)


def test_a_checkpoint_without_that_of_a_module_is_refused_if_strict(tmp_path: Path) -> None:
    class Bare(Scaled):
        get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

    saved, *_ = shoal.initialize(model=nn.Sequential(Scaled(), Bare()), config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": AdamW})
    saved.save_checkpoint(str(tmp_path))
    engine = build()
    with pytest.raises(CheckpointError, match=f"holds no '{STATES[1]}', which get_extra_state of this model returns"):
        engine.load_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path), load_module_strict=False)


def test_extra_state_may_be_a_stream_of_bytes(tmp_path: Path) -> None:
    engine, other = build(layers=1), build(layers=1)
    engine.module.get_submodule("0").history = io.BytesIO(b"scales")
    engine.save_checkpoint(str(tmp_path))
    engine.wait_for_checkpoint()
    other.load_checkpoint(str(tmp_path))
    assert histories(other)[0].getvalue() == b"scales"


def test_what_cannot_be_saved_without_pickle_is_named(tmp_path: Path) -> None:
    engine = build()
    engine.module.get_submodule("1").history = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"extra_states\['1._extra_state'\]: got torch.nn.modules.linear.Linear"):
        engine.save_checkpoint(str(tmp_path))


def test_an_export_says_that_it_leaves_extra_state_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = build()
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.wait_for_checkpoint()
    with caplog.at_level(logging.WARNING, "shoal"), read(tmp_path / "saved") as snapshot:
        logging.getLogger("shoal").addHandler(caplog.handler)
        export(snapshot, tmp_path / "exported")
        logging.getLogger("shoal").removeHandler(caplog.handler)
    assert f"the extra state of 2 modules, such as '{STATES[0]}', is not exported" in caplog.text
