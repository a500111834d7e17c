"""A failure on one rank ends the step on every rank, whatever it waits for, and each rank names where it began.

No wait runs into the timeout of the engine: `run_ranks` gives up long before it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.errors import PipelineError, ShoalError
from shoal.testing import run_ranks

from .test_agreement import WIDTH, batches

LONG = 600
"""Seconds of the engine's timeout; after 120 `run_ranks` fails the test."""


class Breaks(nn.Module):
    """Fails at its n-th forward or backward."""

    def __init__(self, *, forward: int = 0, backward: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.fails = {"forward": forward, "backward": backward}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails["forward"]:
            raise ValueError("out of luck")
        y = self.inner(x)
        if self.calls == self.fails["backward"]:
            y.register_hook(self.fail)
        return y

    def fail(self, gradient: Tensor) -> None:
        raise ValueError("out of luck")


def engine_of(broken: int, zero: int = 0, **fails: int) -> Any:
    """Two stages of two layers, of which layer `broken` fails."""
    layers = [shoal.LayerSpec(Breaks, **(fails if layer == broken else {})) for layer in range(4)]
    module = shoal.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    return shoal.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "timeout": LONG,
        "zero_optimization": {"stage": zero}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})[0]


def failing(case: str) -> str:
    rank = dist.get_rank()
    match case:
        case "tail":  # the other stage has done its row, and waits for the end of the step
            engine = engine_of(0, backward=3)
        case "evaluation's tail":
            engine = engine_of(2, forward=3)
        case "another pipeline":  # of other samples: no channel leads there
            engine = engine_of(2, forward=2 if rank == 3 else 0)
        case _:
            engine = engine_of(2, 3, forward=2 if rank == 3 else 0)
    with pytest.raises(PipelineError) as found:
        if case == "evaluation's tail":
            engine.eval_batch(batches(), num_micro_batches=3)
        else:
            engine.train_batch(batches())
    with pytest.raises(ShoalError, match="an earlier step failed"):
        engine.train_batch(batches())
    return str(found.value)


@pytest.mark.parametrize(("case", "ranks", "words"), [
    ("tail", 2, "rank 0 (stage 0): 0B2 failed: ValueError: out of luck"),
    ("evaluation's tail", 2, "rank 1 (stage 1): 1F2 failed: ValueError: out of luck"),
    ("another pipeline", 4, "rank 3 (stage 1): 1F1 failed: ValueError: out of luck"),
    ("another pipeline, at stage 3", 4, "rank 3 (stage 1): 1F1 failed: ValueError: out of luck"),
])
def test_who_waits_for_a_rank_that_failed_is_told_where_it_began(case: str, ranks: int, words: str) -> None:
    for said in run_ranks(ranks, failing, case):
        assert said.startswith(words)


def astray() -> str:
    engine = engine_of(0)
    engine.train_batch(batches())
    engine.eval_batch(batches())
    with pytest.raises(ShoalError) as found:
        if dist.get_rank():
            engine.train_batch(batches())
        else:
            engine.eval_batch(batches())
    return str(found.value)


def test_ranks_that_call_different_things_in_the_midst_of_training_are_told() -> None:
    for said in run_ranks(2, astray):
        assert "ranks call different things: rank" in said and "train_batch of 3 microbatches" in said
        assert "eval_batch of 3 microbatches" in said


def interrupted() -> str:
    def items() -> Any:
        yield next(batches())
        raise KeyboardInterrupt

    engine = engine_of(9)
    engine.train_batch(batches())
    rank = dist.get_rank()
    with pytest.raises((KeyboardInterrupt, ShoalError)) as found:
        engine.train_batch(items() if rank == 0 else batches())
    assert isinstance(found.value, KeyboardInterrupt) is (rank == 0)
    return str(found.value)


def test_an_interrupt_while_a_rank_draws_is_heard_by_those_who_wait() -> None:
    said = "rank 0: train_batch of 3 microbatches: the iterator ended the program: KeyboardInterrupt"
    assert said in run_ranks(2, interrupted)[1]


def in_place() -> str:
    layers = [shoal.LayerSpec(nn.Linear, WIDTH, WIDTH), shoal.LayerSpec(nn.ReLU, inplace=True),
              shoal.LayerSpec(nn.Linear, WIDTH, WIDTH), shoal.LayerSpec(nn.ReLU, inplace=True)]
    module = shoal.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method=[0, 1, 4])
    engine = shoal.initialize(model=module, config={"train_micro_batch_size_per_gpu": 2, "timeout": LONG,
                                                    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})[0]
    with pytest.raises(PipelineError) as found:
        engine.train_batch(batches())
    return str(found.value)


def test_a_layer_that_changes_what_came_from_another_stage_is_named() -> None:
    for said in run_ranks(2, in_place):
        assert "layer '1' (ReLU) changes its input in place, and that came from another stage" in said


def recovered() -> list[float]:
    """A failure that every rank has heard of by itself leaves the groups whole: a new engine may go on."""
    engine = engine_of(2, forward=2)
    with pytest.raises(PipelineError, match="out of luck"):
        engine.train_batch(batches())
    torch.manual_seed(0)
    again = engine_of(9)
    return [again.train_batch(batches()).item() for _ in range(2)]


def test_a_new_engine_may_follow_one_that_failed() -> None:
    found = run_ranks(2, recovered)
    assert found[0] == found[1]
