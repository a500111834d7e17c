"""Blocks of a published configuration that the engine honours, that scripts read, or that have no effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal.compat.deepspeed as deepspeed
from shoal.compat.deepspeed.elasticity import ElasticityConfigError
from shoal.compat.deepspeed.runtime.config import DeepSpeedConfig
from shoal.compat.deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from shoal.compat.tolerance import INERT, tolerate
from shoal.config.resolve import nested
from shoal.engine.schema import Config
from shoal.errors import NotSupportedYet
from shoal.testing import run_ranks

ADAM = {"type": "Adam", "params": {"lr": 0.1}}


@pytest.mark.parametrize("path", INERT)
def test_a_key_without_effect_is_none_that_shoal_honours(path: str) -> None:
    *sections, key = path.split(".")
    kind: Any = Config
    for section in sections:
        kind = nested(kind)[section]
    honoured = {kind.aliases.get(name, name) for name in (key, f"stage3_{key}")} & {*kind.model_fields}
    assert not honoured or INERT[path].for_scripts


@pytest.mark.parametrize(("given", "stage"), [(True, 1), (False, 0)])
def test_a_boolean_for_zero_is_its_oldest_form(given: bool, stage: int) -> None:
    found = tolerate({"train_batch_size": 1, "zero_optimization": given, "allgather_size": 100})
    assert found["zero_optimization"]["stage"] == stage
    assert found["zero_optimization"].get("allgather_bucket_size") == (100 if given else None)


def test_scripts_read_activation_checkpointing_and_not_the_engine() -> None:
    block = {"partition_activations": True, "cpu_checkpointing": True}
    assert "activation_checkpointing" not in tolerate({"train_batch_size": 1, "activation_checkpointing": block})
    native = {**block, "recompute": "full"}
    assert tolerate({"train_batch_size": 1, "activation_checkpointing": native})["activation_checkpointing"] == native


ELASTIC = {"enabled": True, "max_train_batch_size": 16, "micro_batch_sizes": [2, 3]}


def test_an_elastic_section_gives_the_batch() -> None:
    found = DeepSpeedConfig({"elasticity": ELASTIC})
    sizes = found.train_micro_batch_size_per_gpu * found.gradient_accumulation_steps
    assert (found.train_batch_size, sizes) == (12, 12)
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        with pytest.raises(ElasticityConfigError, match="beside it"):
            tolerate({"elasticity": ELASTIC, key: 12})
    ignoring = {**ELASTIC, "ignore_non_elastic_batch_info": True}
    assert DeepSpeedConfig({"elasticity": ignoring, "train_batch_size": 5}).train_batch_size == 12


class Dropping(nn.Module):
    """Multiplies by the share of layers that it is told to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.told: list[float | None] = []

    def forward(self, value: torch.Tensor, progressive_layer_drop: bool = False, pld_theta: float | None = None) -> Any:
        self.told.append(pld_theta if progressive_layer_drop else None)
        return self.layer(value)


def dropped_layers() -> bool:
    """Blocks that build engines: progressive layer dropping, the oldest form of ZeRO, an elastic batch."""
    pld = {"enabled": True, "theta": 0.5, "gamma": 0.1}
    engine = deepspeed.initialize(model=Dropping(), config={
        "train_batch_size": 1, "optimizer": ADAM, "progressive_layer_drop": pld})[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    engine.eval()
    engine(torch.ones(1, 2))
    expected = [1.0, 0.5 + 0.5 * 2.718281828 ** -0.1]
    assert engine.module.told[:2] == pytest.approx(expected)
    assert engine.module.told[2:] == [None]
    assert engine.progressive_layer_drop_enabled()
    assert [engine.pld_theta(), engine.pld_gamma(), engine.get_pld_theta()] == pytest.approx([0.5, 0.1, expected[1]])

    engine = deepspeed.initialize(model=nn.Linear(2, 1), config={
        "train_batch_size": 1, "optimizer": ADAM, "zero_optimization": True})[0]
    assert engine.zero_optimization_stage() == 1
    assert engine.get_pld_theta() is None
    engine = deepspeed.initialize(model=nn.Linear(2, 1), config={"elasticity": ELASTIC, "optimizer": ADAM})[0]
    assert engine.train_batch_size() == engine._config.train_batch_size == 12
    with engine.coalesce_grad_reduction():
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 2)).sum())
    for call, given in ((engine.set_data_post_process_func, print), (engine.set_custom_curriculum_learning_schedule, {})):
        with pytest.raises(NotSupportedYet, match="not supported yet"):
            call(given)
    return True


def test_blocks_give_engines_what_they_say() -> None:
    assert run_ranks(1, dropped_layers) == [True]


@pytest.mark.parametrize("kind", [OnebitAdam, OnebitLamb, ZeroOneAdam])
def test_compressing_optimizers_refuse_what_they_cannot_do(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    kind([weight], None, 0.1, cuda_aware=False, comm_backend_name="nccl")
    with pytest.raises(RuntimeError, match="amsgrad"):
        kind([weight], amsgrad=True)
    with pytest.raises(ValueError, match="gradient_clipping"):
        kind([weight], max_grad_norm=1.0)


def test_literal_dotted_keys_fill_in_their_section(caplog: pytest.LogCaptureFixture) -> None:
    given = {"train_batch_size": 1,
             "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "allgather_bucket_size": 7},
             "zero_optimization.reduce_bucket_size": 64, "zero_optimization.allgather_bucket_size": 8,
             "zero_optimization.stage3_prefetch_bucket_size": 9.6}  # TRL writes fractions
    zero = tolerate(given)["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (64, 7, 9)
    assert "unknown key" not in caplog.text
    tolerate({"train_batch_size": 1, "nowhere.key": 1})
    assert "nowhere.key: unknown key" in caplog.text
