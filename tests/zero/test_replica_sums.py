"""Hybrid sharding sums a gradient over the copies of the state once a step, in backward if the step is to follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.engine.engine import Engine
from shoal.errors import UsageError
from shoal.optim.parameter_state import GRADIENT, ParameterState
from shoal.testing import run_ranks

from .test_cost import Wide


def _engine(stage: int, *, shards: int | None = 2, overlap: bool = True, **more: Any) -> Engine:
    torch.manual_seed(0)
    copies = {} if shards is None else {"mics_shard_size": shards}
    return shoal.initialize(model=Wide(), config={
        "train_micro_batch_size_per_gpu": 2, "timeout": 20, "log_level": "error", "gradient_clipping": 0.1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "overlap_comm": overlap, **copies},
        **more})[0]


def _loss(engine: Engine, number: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * number + engine.global_rank)
    return engine(torch.randn(2, 64, generator=random).to(engine.device)).square().mean()


def _joined(engine: Engine) -> set[bool]:
    assert engine.sharded is not None
    return {unit.gradient.spans_copies for unit in engine.sharded.trainable}


def _weights(engine: Engine) -> Tensor:
    with shoal.gathered(engine.module):
        return torch.cat([parameter.detach().flatten() for parameter in engine.module.parameters()])


def _in_backward_or_by_the_step(stage: int, more: dict[str, Any]) -> None:
    early, late = _engine(stage, **more), _engine(stage, **more)
    within: list[set[bool]] = []

    def look(module: nn.Module, *gradients: object) -> None:
        within.append(_joined(early))

    early.module.get_submodule("blocks.0").register_full_backward_hook(look)
    for number in range(3):
        early.backward(_loss(early, number))
        overlaps = number > 0 and more.get("overlap", True)
        assert within.pop() == ({True, False} if overlaps else {False}), "while later units compute their gradients"
        assert _joined(early) == {number > 0}, "after a step that came after one pass"
        early.step()
        late.backward(_loss(late, number), allreduce_gradients=False)
        assert _joined(late) == {False}
        late.step()
        assert early.get_global_grad_norm() == late.get_global_grad_norm()
    assert torch.equal(_weights(early), _weights(late))


@pytest.mark.parametrize(("stage", "more"), [
    (1, {}), (2, {"overlap": False}), (2, {"communication_data_type": "bf16"}), (2, {"shards": 1}), (3, {})],
    ids=["stage 1", "one after the other", "narrow wire", "copies of one rank", "stage 3"])
def test_a_sum_over_copies_in_backward_has_the_bits_of_the_step_s(stage: int, more: dict[str, Any]) -> None:
    run_ranks(4, _in_backward_or_by_the_step, stage, more)


def _accumulated() -> None:
    engine = _engine(2, gradient_accumulation_steps=2)
    for number in range(4):
        engine.backward(_loss(engine, number))
        assert _joined(engine) == {number == 3}, "only where an accumulation ends"
        engine.step()


def test_an_accumulation_is_summed_over_copies_where_it_ends() -> None:
    run_ranks(4, _accumulated)


def _passes(counts: list[int], *, by_call: bool = False) -> Tensor:
    """Train by so many passes in each step; with `by_call` a call sums what a pass has left to the step."""
    engine, number = _engine(2), 0
    for count in counts:
        for _ in range(count):
            engine.backward(_loss(engine, number), allreduce_gradients=not by_call)
            number += 1
        if by_call:
            engine.allreduce_gradients()
            assert _joined(engine) == {True}
        engine.step()
    return _weights(engine)


def test_a_pass_after_a_sum_over_copies_is_added_once() -> None:
    found, expected = run_ranks(4, _passes, [1, 3, 2, 1, 2]), run_ranks(4, _passes, [1, 3, 2, 1, 2], by_call=True)
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine, found[0])
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def _fails_once(stage: int, shards: int | None, launch: str) -> None:
    engine, other = _engine(stage, shards=shards), _engine(stage, shards=shards)
    for each in (engine, other):
        each.backward(_loss(each, 0))
        each.step()
    assert engine.sharded is not None and other.sharded is not None
    gradient, right = (each.trainable[2].gradient for each in (engine.sharded, other.sharded))
    start = getattr(gradient.transport, launch)
    failures = [MemoryError("no room for a buffer")]

    def fails(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return start(*given)

    setattr(gradient.transport, launch, fails)
    with pytest.raises(MemoryError, match="no room for a buffer"):
        engine.backward(_loss(engine, 1))
    gradient.wait_reduced()
    other.backward(_loss(other, 1))
    assert torch.equal(gradient.reduced, right.reduced)


@pytest.mark.parametrize(("stage", "shards", "launch"), [
    (0, None, "replicate"), (2, 2, "sum_over_replicas"), (2, 2, "_replicate_over")])
def test_what_follows_a_sum_and_could_not_start_starts_at_the_next_wait(stage: int, shards: int | None,
                                                                         launch: str) -> None:
    """It never counts as done: a step would take a part of the sum for the whole."""
    run_ranks(4, _fails_once, stage, shards, launch)


def _read() -> None:
    engine = _engine(2)
    assert engine.optimizer is not None
    parameter = next(engine.module.parameters())
    state = ParameterState.of(engine.optimizer, parameter)
    assert state is not None
    engine.backward(_loss(engine, 0))
    with pytest.raises(UsageError, match=r"its part of a gradient that is not yet summed over the copies"):
        state.local(GRADIENT)
    first = state.full(GRADIENT)
    assert first is not None and state.local(GRADIENT) is not None, "the whole was summed over the copies"
    assert first.abs().sum() > 0
    assert state.write_full(GRADIENT, first * 2)
    engine.backward(_loss(engine, 0))
    thrice = state.full(GRADIENT)
    assert thrice is not None
    torch.testing.assert_close(thrice, first * 3)
    engine.step()


def test_a_gradient_is_read_and_written_as_the_sum_over_copies() -> None:
    run_ranks(4, _read)
