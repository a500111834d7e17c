"""The elastic batch: published figures, a brute-force search, and a training that changes its number of ranks."""

from __future__ import annotations

import json
import re
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.compat.deepspeed import elasticity
from shoal.compat.deepspeed.launcher import ds_elastic
from shoal.engine.schema import Config
from shoal.errors import ConfigError
from shoal.resilience.elastic import WorldSizeError, elastic_batch, valid_sizes
from shoal.resilience.settings import ElasticitySettings
from shoal.testing import run_ranks

PUBLISHED: dict[str, Any] = {"enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17],
                             "min_gpus": 32, "max_gpus": 1500, "min_time": 20, "version": 0.1}
SMALL: dict[str, Any] = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2], "version": 0.1}


def settings_of(**changes: Any) -> ElasticitySettings:
    return ElasticitySettings(**{**PUBLISHED, **changes})


def test_the_published_example_has_its_published_batch_and_sizes() -> None:
    batch = elastic_batch(settings_of())
    assert (batch.total, len(batch.sizes)) == (9792, 23)
    assert elastic_batch(settings_of(), 64).micro == 17


def divisor_count(number: int) -> int:
    return sum(number % each == 0 for each in range(1, number + 1))


def brute_force(settings: ElasticitySettings) -> tuple[int, list[int]]:
    """Search all multiples that have more divisors than each smaller one, and test every number of ranks."""
    micros, cap = settings.micro_batch_sizes, settings.max_train_batch_size
    counts = [divisor_count(number) for number in range(1, cap + 1)]
    records = [n for n in range(1, cap + 1) if n == 1 or counts[n - 1] > max(counts[:n - 1])]
    best: tuple[int, int, int, list[int]] = (-1, 0, 0, [])
    for base in {*micros, lcm(*micros)}:
        if base > cap:
            continue
        total = base * max(record for record in records if record * base <= cap)
        sizes = [n for n in range(settings.min_gpus, settings.max_gpus + 1)
                 if any(total % (m * n) == 0 for m in micros)]
        best = max(best, (len(sizes), total if settings.prefer_larger_batch else -total, total, sizes))
    return best[2], best[3]


@given(micros=st.lists(st.integers(1, 9), min_size=1, max_size=4), cap=st.integers(9, 200), most=st.integers(1, 60),
       larger=st.booleans())
def test_the_batch_is_that_of_a_search_over_everything(micros: list[int], cap: int, most: int, larger: bool) -> None:
    settings = settings_of(max_train_batch_size=cap, micro_batch_sizes=micros, min_gpus=1, max_gpus=most,
                           prefer_larger_batch=larger)
    total, sizes = brute_force(settings)
    assert (elastic_batch(settings).total, list(elastic_batch(settings).sizes)) == (total, sizes)


@given(total=st.integers(1, 400), micros=st.lists(st.integers(1, 9), min_size=1), least=st.integers(1, 9))
def test_valid_sizes_are_those_that_divide_the_batch(total: int, micros: list[int], least: int) -> None:
    divide = [n for n in range(least, 51) if any(total % (m * n) == 0 for m in micros)]
    assert valid_sizes(total, micros, least, 50) == divide


def test_version_2_counts_nodes_and_chooses_the_micro_batch() -> None:
    settings = settings_of(version=0.2, min_gpus=1, num_gpus_per_node=8, model_parallel_size=2)
    batch = elastic_batch(settings, 64)
    assert batch.total <= 10000
    assert all(size % 4 == 0 for size in batch.sizes)
    assert 64 in batch.sizes
    assert batch.micro is not None
    assert batch.total % (64 * batch.micro) == 0


def test_version_2_makes_a_batch_for_a_size_that_is_not_valid() -> None:
    settings = settings_of(version=0.2, max_train_batch_size=100, micro_batch_sizes=[2, 3], min_gpus=1, max_gpus=20)
    batch = elastic_batch(settings, 19)
    assert (batch.total, batch.sizes, batch.micro) == (76, (19,), 2)
    with pytest.raises(WorldSizeError, match="60 data ranks"):
        elastic_batch(settings, 60)


def test_version_2_leaves_out_micro_batches_that_do_not_fit_the_size() -> None:
    settings = settings_of(version=0.2, max_train_batch_size=100, micro_batch_sizes=[2, 64], min_gpus=1, max_gpus=20,
                           prefer_larger_batch=False)
    batch = elastic_batch(settings, 5)
    assert (batch.total, batch.sizes, batch.micro) == (100, (5,), 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_the_configuration_keeps_the_global_batch(ranks: int) -> None:
    config = Config.resolve({"elasticity": SMALL}, data_ranks=ranks)
    assert config.batch.total == 12
    assert config.batch.micro * config.batch.accumulation * ranks == 12
    assert config.origins["gradient_accumulation_steps"].startswith("derived (elasticity, ")
    assert Config.resolve(config.as_dict(), data_ranks=ranks).batch == config.batch


@pytest.mark.parametrize(("changes", "message"), [
    ({"elasticity": {**SMALL, "micro_batch_sizes": []}}, r"sizes: got \[\]; give a list with at least 1 of them"),
    ({"elasticity": {**SMALL, "micro_batch_sizes": "24"}}, 'sizes: got "24"; give a list, such as \\[2, 4\\]'),
    ({"elasticity": {**SMALL, "max_gpus": 2}}, "3 data ranks cannot share a batch of 12"),
    ({"elasticity": SMALL, "train_batch_size": 24}, "train_batch_size: got 24, and elasticity gives 12"),
    ({"elasticity": {"enabled": True}}, "elasticity.max_train_batch_size: missing"),
    ({"elasticity": {**SMALL, "min_gpus": 9, "max_gpus": 8}}, "elasticity.min_gpus: got 9 beside max_gpus 8"),
    ({"elasticity": {**SMALL, "micro_batch_sizes": [2, 13]}}, "got 13, above max_train_batch_size 12"),
    ({"elasticity": {**SMALL, "micro_batch_sizes": [0]}}, "elasticity.micro_batch_sizes"),
    ({"elasticity": {**SMALL, "version": 0.3}}, "elasticity.version"),
    ({"elasticity": {**SMALL, "version": 0.2, "num_gpus_per_node": 4, "model_parallel_size": 3}}, "does not divide"),
    ({"elasticity": {**SMALL, "num_gpus_per_node": 2, "model_parallel_size": 2}}, "counts data ranks only"),
])  # fmt: skip
def test_elastic_sizes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    if "max_gpus" in changes["elasticity"] and "min_gpus" not in changes["elasticity"]:
        changes["elasticity"] = {**changes["elasticity"], "micro_batch_sizes": [2]}
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        Config.resolve(changes, data_ranks=3)


# The published functions


def test_the_published_function_returns_the_micro_batch_of_a_world() -> None:
    total, sizes = elasticity.compute_elastic_config({"elasticity": PUBLISHED}, "0.3.8")
    assert (total, len(sizes)) == (9792, 23)
    assert elasticity.compute_elastic_config({"elasticity": PUBLISHED}, "0.19.8", world_size=64)[2] == 17
    assert elasticity.elasticity_enabled({"elasticity": PUBLISHED})


@pytest.mark.parametrize(("config", "version", "ranks", "kind"), [
    ({}, "0.19.8", 0, elasticity.ElasticityConfigError),
    ({"elasticity": {**PUBLISHED, "enabled": False}}, "0.19.8", 0, elasticity.ElasticityConfigError),
    ({"elasticity": {**PUBLISHED, "min_time": -1}}, "0.19.8", 0, elasticity.ElasticityConfigError),
    ({"elasticity": {**PUBLISHED, "max_train_batch_size": 4}}, "0.19.8", 0, ValueError),
    ({"elasticity": PUBLISHED}, "0.3.7", 0, elasticity.ElasticityError),
    ({"elasticity": PUBLISHED}, "0.19.8", 128 * 3 + 1, elasticity.ElasticityIncompatibleWorldSize),
])  # fmt: skip
def test_the_published_errors_are_raised(config: dict[str, Any], version: str, ranks: int, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        elasticity.compute_elastic_config(config, version, world_size=ranks)


def test_a_section_other_than_the_schedulers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    elasticity.ensure_immutable_elastic_config(PUBLISHED)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", "{max}")
    with pytest.raises(elasticity.ElasticityConfigError, match="DEEPSPEED_ELASTICITY_CONFIG: got what is no JSON"):
        elasticity.ensure_immutable_elastic_config(PUBLISHED)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", '{"max_train_batch_size": 1}')
    with pytest.raises(elasticity.ElasticityConfigError, match="planned for 1"):
        elasticity.ensure_immutable_elastic_config(PUBLISHED)


def test_ds_elastic_prints_the_batch_and_the_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"elasticity": SMALL}))
    assert ds_elastic.command(["-c", str(path), "-w", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "global batch: 12 samples", "ranks: 1, 2, 3, 4, 6, 12", "micro-batch on 3 ranks: 2, accumulation 2"]
    assert ds_elastic.command(["-c", str(path), "-w", "5"]) == 2
    assert "5 data ranks cannot share" in capsys.readouterr().err


def test_ds_elastic_counts_ranks_of_a_model_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"elasticity": {
        "enabled": True, "version": 0.2, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 1,
        "max_gpus": 64, "num_gpus_per_node": 8, "model_parallel_size": 2}}))
    assert ds_elastic.command(["-c", str(path), "-w", "8"]) == 0
    batch, sizes, micro = capsys.readouterr().out.splitlines()
    total, (size, accumulation) = int(batch.split()[2]), map(int, re.findall(r"(\d+)(?:,|$)", micro))
    assert sizes.startswith("data ranks, each of 2 ranks: ")
    assert micro.startswith("micro-batch on 8 ranks: ") and size * accumulation * 4 == total
    assert ds_elastic.command(["-c", str(path), "-w", "3"]) == 2
    assert "3 ranks hold no whole number of copies of a model on 2 ranks" in capsys.readouterr().err


# A job that changes its size


class Numbered(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), index


def part_of_training(folder: str, steps: int) -> tuple[list[int], list[list[float]]]:
    """Train `steps` steps from the checkpoint in `folder`; return the samples that this rank saw, and the weights."""
    torch.manual_seed(0)
    config = {"elasticity": SMALL, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}
    engine, _, loader, _ = shoal.initialize(model=nn.Linear(4, 1), training_data=Numbered(), config=config)
    if Path(folder, "latest").exists():
        engine.load_checkpoint(folder)
    seen: list[int] = []
    last = engine.global_steps + steps
    while engine.global_steps < last:
        for batch, indices in loader:
            seen += indices.tolist()
            engine.backward(engine(batch).square().mean())
            engine.step()
            if engine.global_steps == last:
                break
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    return seen, [p.detach().flatten().tolist() for p in engine.module.parameters()]


def test_each_sample_is_used_once_when_the_number_of_ranks_changes(tmp_path: Path) -> None:
    elastic = [run_ranks(ranks, part_of_training, str(tmp_path / "elastic"), 1) for ranks in (2, 3, 1)]
    fixed = run_ranks(2, part_of_training, str(tmp_path / "fixed"), 3)
    seen = [index for part in elastic for indices, _ in part for index in indices]
    assert len(seen) == len(set(seen)) == 36
    assert set(seen) == {index for indices, _ in fixed for index in indices}
    for one, other in zip(elastic[-1][0][1], fixed[0][1], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-6)
