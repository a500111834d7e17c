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
"""Seconds of the engine's timeout; `run_ranks` fails the test long before."""


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
    """Return an engine of two stages with two layers each, of which layer `broken` fails."""
    layers = [shoal.LayerSpec(Breaks, **(fails if layer == broken else {})) for layer in range(4)]
    module = shoal.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    return shoal.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "timeout": LONG,
        "zero_optimization": {"stage": zero}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})[0]


def failing(case: str) -> str:
    rank = dist.get_rank()
    match case:
        case "tail":  # the other stage has finished its row, and waits for the end of the step
            engine = engine_of(0, backward=3)
        case "evaluation's tail":
            engine = engine_of(2, forward=3)
        case "another pipeline":  # of another data rank, to which no channel leads
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
def test_ranks_that_wait_for_a_failed_rank_name_it(case: str, ranks: int, words: str) -> None:
    for message in run_ranks(ranks, failing, case):
        assert message.startswith(words)


def different_calls() -> str:
    engine = engine_of(0)
    engine.train_batch(batches())
    engine.eval_batch(batches())
    with pytest.raises(ShoalError) as found:
        if dist.get_rank():
            engine.train_batch(batches())
        else:
            engine.eval_batch(batches())
    return str(found.value)


def test_ranks_that_make_different_calls_are_told_so() -> None:
    for message in run_ranks(2, different_calls):
        assert "ranks call different things: rank" in message and "train_batch of 3 microbatches" in message
        assert "eval_batch of 3 microbatches" in message


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


def test_an_interrupt_while_drawing_reaches_the_ranks_that_wait() -> None:
    message = "rank 0: train_batch of 3 microbatches: the iterator ended the program: KeyboardInterrupt"
    assert message in run_ranks(2, interrupted)[1]


def in_place() -> str:
    layers = [shoal.LayerSpec(nn.Linear, WIDTH, WIDTH), shoal.LayerSpec(nn.ReLU, inplace=True),
              shoal.LayerSpec(nn.Linear, WIDTH, WIDTH), shoal.LayerSpec(nn.ReLU, inplace=True)]
    module = shoal.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method=[0, 1, 4])
    engine = shoal.initialize(model=module, config={"train_micro_batch_size_per_gpu": 2, "timeout": LONG,
                                                    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})[0]
    with pytest.raises(PipelineError) as found:
        engine.train_batch(batches())
    return str(found.value)


def test_a_layer_that_changes_its_stage_input_in_place_is_named() -> None:
    for message in run_ranks(2, in_place):
        assert "layer '1' (ReLU) changes its input in place, and that input came from another stage" in message


def recovered() -> list[float]:
    """A failure that reaches every rank through the channels leaves the groups usable for a new engine."""
    engine = engine_of(2, forward=2)
    with pytest.raises(PipelineError, match="out of luck"):
        engine.train_batch(batches())
    torch.manual_seed(0)
    second = engine_of(9)
    return [second.train_batch(batches()).item() for _ in range(2)]


def test_a_new_engine_may_follow_a_failed_one() -> None:
    found = run_ranks(2, recovered)
    assert found[0] == found[1]
