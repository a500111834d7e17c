"""Training data through the engine: distributed over ranks, and resumed from a checkpoint on any number of ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.data import Loader, RepeatingLoader
from shoal.engine.engine import Engine
from shoal.errors import ConfigError, UsageError
from shoal.testing import run_ranks

from .trained import configured

SAMPLES = 53


class Numbers(torch.utils.data.Dataset[Tensor]):
    """Sample i is the number i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def build(micro: int = 2, accumulation: int = 1, stage: int = 2, **extra: Any) -> tuple[Engine, Any]:
    torch.manual_seed(0)
    config = configured(stage, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation,
                        optimizer={"type": "SGD", "params": {"lr": 1e-6}}, **extra)
    engine, _, loader, _ = shoal.initialize(model=nn.Linear(1, 1), training_data=Numbers(), config=config)
    return engine, loader


def numbers(samples: Tensor) -> list[int]:
    return [int(sample) for sample in samples.flatten().tolist()]


def step(engine: Engine, samples: Tensor) -> list[int]:
    engine.backward(engine(samples).mean())
    engine.step()
    return numbers(samples)


def begin(folder: str, microbatches: int, micro: int, accumulation: int, stage: int) -> list[int]:
    engine, loader = build(micro, accumulation, stage)
    assert loader is engine.training_dataloader
    batches, seen = RepeatingLoader(loader), []
    for _ in range(microbatches):
        seen += step(engine, next(batches))
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    return seen


def resume(folder: str, micro: int, stage: int) -> list[int]:
    engine, loader = build(micro, stage=stage)
    engine.load_checkpoint(folder)
    return [number for samples in loader for number in step(engine, samples)]


@pytest.mark.parametrize(("first", "then"), [((1, 2), (3, 4)), ((4, 3), (1, 2)), ((2, 2), (2, 2))])
def test_resuming_on_other_ranks_neither_repeats_nor_skips_samples(first: tuple[int, int], then: tuple[int, int],
                                                                   tmp_path: Path) -> None:
    """(ranks, microbatch) before and after."""
    before = [n for rank in run_ranks(first[0], begin, str(tmp_path), 4, first[1], 2, 2) for n in rank]
    after = [n for rank in run_ranks(then[0], resume, str(tmp_path), then[1], 3) for n in rank]
    assert len(before) == len(set(before)) == 4 * first[0] * first[1]
    assert set(before) | set(after) == set(range(SAMPLES)) and not set(before) & set(after)
    assert sum(Counter(after).values()) - len(set(after)) < then[0]  # the last step's shares are filled up


def test_samples_of_an_unfinished_accumulation_are_delivered_again(tmp_path: Path) -> None:
    trained = 8  # of each of two ranks: two steps of two microbatches of 2; a fifth is in no step when it is saved
    before = [n for rank in run_ranks(2, begin, str(tmp_path), 5, 2, 2, 2) for n in rank[:trained]]
    after = [n for rank in run_ranks(2, resume, str(tmp_path), 2, 2) for n in rank]
    assert len(set(before)) == 2 * trained and not set(before) & set(after)
    assert set(before) | set(after) == set(range(SAMPLES))


def test_resuming_in_a_later_epoch_continues_that_epoch(tmp_path: Path) -> None:
    epoch = 27  # samples of each of two ranks: 13 microbatches of 2, and one of 1
    second = [n for rank in run_ranks(2, begin, str(tmp_path), 20, 2, 1, 1) for n in rank[epoch:]]
    after = [n for rank in run_ranks(3, resume, str(tmp_path), 4, 0) for n in rank]
    assert len(set(second)) == 6 * 4 and set(second) | set(after) == set(range(SAMPLES)) and not set(second) & set(after)


def deal() -> None:
    engine, loader = build()
    assert isinstance(loader, Loader) and len(loader) == 14 and loader.batch_size == 2
    assert numbers(next(iter(engine.deepspeed_io(Numbers(), route="eval", batch_size=3)))) == (
        [0, 1, 2] if engine.global_rank == 0 else [3, 4, 5])
    doubled = engine.deepspeed_io(Numbers(), collate_fn=lambda samples: 2 * torch.stack(samples), route="predict")
    assert numbers(next(iter(doubled))) == ([0, 2] if engine.global_rank == 0 else [4, 6])
    assert len(build(dataloader_drop_last=True)[1]) == 13


def test_evaluation_data_is_in_order_and_training_data_shuffled() -> None:
    run_ranks(2, deal)


def grow() -> list[int]:
    """Change the microbatch within an epoch."""
    engine, loader = build(1)
    seen: list[int] = []
    for index, samples in enumerate(loader):
        assert len(samples) == loader.batch_size or len(seen) > SAMPLES // 2 - 4
        seen += step(engine, samples)
        if index == 3:
            engine.set_train_micro_batch_size(4)
    assert loader.batch_size == 4 and len(loader) == 7
    return seen


def test_changing_the_microbatch_within_an_epoch_yields_every_sample() -> None:
    first, second = run_ranks(2, grow)
    assert set(first) | set(second) == set(range(SAMPLES))
    assert len(first) + len(second) - SAMPLES < 2


def test_collate_fn_of_initialize_builds_the_batches() -> None:
    _, _, loader, _ = shoal.initialize(model=nn.Linear(1, 1), training_data=Numbers(), config=configured(),
                                       collate_fn=lambda samples: numbers(torch.stack(samples)))
    batch = next(iter(loader))
    assert isinstance(batch, list) and len(batch) == 2


def test_wrong_data_arguments_are_refused() -> None:
    engine, _ = build()
    with pytest.raises(UsageError, match=r"deepspeed_io: route: got 'test'; choose one of train, eval, predict"):
        engine.deepspeed_io(Numbers(), route="test")
    with pytest.raises(UsageError, match="deepspeed_io: data_sampler is not supported: the loader's own order"):
        engine.deepspeed_io(Numbers(), data_sampler=object())
    with pytest.raises(UsageError, match="training_data: got int, which lacks __len__ or __getitem__"):
        engine.deepspeed_io(3)
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu: got -1; it must be 1 or more"):
        engine.deepspeed_io(Numbers(), batch_size=-1)
