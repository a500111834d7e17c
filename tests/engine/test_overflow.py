"""An overflow on one rank skips the step on every rank, and changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.engine.engine import Engine
from shoal.errors import LossScaleError, UsageError
from shoal.testing import run_ranks

from ..zero.models import batch, loss_of
from .trained import build, loss, same, train, weights

FP16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}


def poisoned_step(engine: Engine, step: int) -> None:
    """Step on gradients that are infinite on rank 1 alone."""
    engine.backward(loss(engine, step) * (float("inf") if dist.get_rank() == 1 else 1))
    engine.step()


def fp16(stage: int) -> list[Any]:
    engine = build(stage, fp16=FP16, scheduler=WARMUP)
    assert engine.fp16_enabled() and engine.dynamic_loss_scale() and engine.loss_scale() == 16
    train(engine, 1)
    before, rates = weights(engine), engine.get_lr()
    assert engine.was_step_applied() and engine.optimizer is not None and not engine.optimizer.overflow
    poisoned_step(engine, 1)
    assert not engine.was_step_applied() and engine.optimizer.overflow
    assert same(before, weights(engine)) and engine.get_lr() == rates
    assert (engine.global_steps, engine.skipped_steps, engine.loss_scale()) == (2, 1, 8)
    train(engine, 3, 2)
    assert not same(before, weights(engine)) and engine.get_lr() > rates
    assert (engine.skipped_steps, engine.loss_scale()) == (1, 16)  # a window of two clean steps, and the next one
    return [value.double().sum().item() for value in weights(engine).values()]


@pytest.mark.parametrize("stage", range(4))
def test_one_overflow_skips_the_step_on_all_ranks_and_halves_the_scale(stage: int) -> None:
    first, second = run_ranks(2, fp16, stage)
    assert first == second


def floor(stage: int) -> str:
    engine = build(stage, fp16={**FP16, "initial_scale_power": 1, "min_loss_scale": 1})
    poisoned_step(engine, 0)
    assert engine.loss_scale() == 1
    before = weights(engine)
    with pytest.raises(LossScaleError) as caught:
        poisoned_step(engine, 1)
    assert same(before, weights(engine)) and engine.global_steps == 1
    train(engine, 1)  # nothing of the failed step is left
    assert engine.was_step_applied()
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_at_the_smallest_scale_raises_on_every_rank(stage: int) -> None:
    first, second = run_ranks(2, floor, stage)
    assert first == second
    assert first.startswith("step 1: the gradients overflow at loss scale 1, the smallest that fp16.min_loss_scale allows")


def bf16(check: bool) -> tuple[bool, bool, int]:
    engine = build(2, bf16={"enabled": True, "check_grad_overflow": check}, gradient_clipping=0)
    before = weights(engine)
    poisoned_step(engine, 0)
    return engine.was_step_applied(), same(before, weights(engine)), engine.skipped_steps


def test_a_bf16_step_with_an_infinity_is_skipped_if_configured() -> None:
    assert run_ranks(2, bf16, True) == [(False, True, 1)] * 2
    assert run_ranks(2, bf16, False) == [(True, False, 0)] * 2


def test_the_warning_of_a_skipped_step_shows_the_scale(caplog: pytest.LogCaptureFixture) -> None:
    engine = build(fp16=FP16)
    engine.backward(loss(engine, 0) * float("inf"))
    with caplog.at_level("WARNING", logger="shoal"):  # another test of this process may have set log_level
        engine.step()
    assert "step 1: gradients overflowed, the step is skipped; loss scale is now 8" in caplog.messages


def test_an_unscaled_backward_is_refused_while_the_loss_is_scaled() -> None:
    engine = build(fp16=FP16)
    with pytest.raises(UsageError, match=r"loss\.backward\(\) was called on an unscaled loss while the loss scale is 16; "
                                         r"call engine\.backward\(loss\), or engine\.scale\(loss\)\.backward\(\)"):
        loss(engine, 0).backward()
    engine = build(fp16=FP16, gradient_accumulation_steps=2)
    other = build(fp16=FP16, gradient_accumulation_steps=2)
    for micro in range(2):
        value = loss(engine, 0, micro)
        returned = engine.backward(value)
        assert returned.item() == pytest.approx(value.item() / 2) and not returned.requires_grad
        engine.step()
        other.scale(loss(other, 0, micro)).backward()
        other.step()
    assert same(weights(engine), weights(other)) and engine.get_global_grad_norm() == other.get_global_grad_norm()


STATIC = {"enabled": True, "loss_scale": 16}


def test_a_failed_backward_does_not_let_an_unscaled_loss_pass() -> None:
    engine = build(fp16=STATIC)
    for call in (engine.backward, lambda value: engine.scale(value).backward()):
        value = loss(engine, 0)
        call(value)
        engine.step()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            call(value)
        with pytest.raises(UsageError, match="unscaled loss while the loss scale is 16"):
            loss(engine, 1).backward()


def test_an_unused_scaled_loss_does_not_let_an_unscaled_one_pass() -> None:
    engine = build(fp16=STATIC)
    engine.scale(loss(engine, 0))
    with pytest.raises(UsageError, match="unscaled loss while the loss scale is 16"):
        loss(engine, 0).backward()


def test_a_scaled_loss_passes_where_its_first_gradients_are_of_a_recompute() -> None:
    engine = build(fp16=STATIC)
    tokens, targets = batch(0, 0, 0)
    embedded = torch.ones((), requires_grad=True)  # without an input that requires one, checkpoint gives no gradient
    value = checkpoint(lambda one: loss_of(engine(tokens), targets) * one, embedded, use_reentrant=True)
    scaled = engine.scale(value)
    for _ in range(2):
        scaled.backward(retain_graph=True)
    engine.step()
    assert engine.global_steps == 1


def test_auto_cast_casts_inputs_to_fp16() -> None:
    import shoal

    config = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, "auto_cast": True}}
    engine = shoal.initialize(model=torch.nn.Bilinear(4, 4, 2), config=config)[0]
    assert engine(torch.ones(1, 4), input2=torch.ones(1, 4)).dtype == torch.float16


def alone(stage: int) -> tuple[int, float | None]:
    model = torch.nn.Linear(8, 8)
    torch.nn.init.constant_(model.weight, 1.0)
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 16, "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {"enabled": True, "loss_scale": 2**13}, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}}})[0]
    for _ in range(16):
        engine.backward(engine(torch.full((4, 8), 8.0).half()).float().sum())
        engine.step()
    return engine.skipped_steps, engine.get_global_grad_norm()


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_keeps_fp32_sums_instead_of_the_wire_dtype(stage: int) -> None:
    (skipped, norm), = run_ranks(1, alone, stage)
    assert skipped == 0 and norm == pytest.approx((64 * 32.0**2 + 8 * 4.0**2) ** 0.5)  # 32 x 2^13 is beyond fp16
