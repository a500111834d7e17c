"""Every setting is honoured: those of performance change no bits, the others have their documented effect."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.engine.engine import Engine
from shoal.errors import UsageError
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

from ..zero.models import Plain
from .trained import build, configured, loss, model, same, train, weights

Outcome = tuple[list[float], dict[str, Tensor]]


def outcomes(stage: int, variants: list[dict[str, Any]]) -> list[Outcome]:
    found = []
    for zero in variants:
        engine = build(stage, zero_optimization=zero)
        found.append((train(engine, 4), weights(engine)))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_bucket_and_prefetch_sizes_change_no_bits(stage: int) -> None:
    variants: list[dict[str, Any]] = [
        {}, {"reduce_bucket_size": 64, "allgather_bucket_size": 100}, {"sub_group_size": 50},
        {"stage3_max_reuse_distance": 1e9}, {"stage3_max_reuse_distance": 700}, {"stage3_prefetch_bucket_size": 0},
        {"stage3_param_persistence_threshold": 100, "stage3_model_persistence_threshold": 60}, {"overlap_comm": False}]
    first, *others = run_ranks(2, outcomes, stage, variants)[0]
    for other, variant in zip(others, variants[1:], strict=True):
        assert first[0] == other[0] and same(first[1], other[1]), variant


def pieces(folder: str, sizes: list[int]) -> list[dict[str, Tensor]]:
    """Return the weights after steps of an optimizer that is torch's own, on disk in pieces of so many elements, or in
    memory (0). Its kernel rounds the last elements of what it is given another way than those before.
    """
    found = []
    for size in sizes:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(13, 27), torch.nn.Linear(27, 13), torch.nn.LayerNorm(13))
        disk = {"device": "nvme", "nvme_path": folder}
        tiers = {"sub_group_size": size, "offload_param": disk, "offload_optimizer": disk} if size else {}
        engine = shoal.initialize(model=layers, config={
            "train_micro_batch_size_per_gpu": 2, "timeout": 20, "zero_optimization": {"stage": 1, **tiers},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "amsgrad": True}}})[0]
        for _ in range(8):
            engine.backward(engine(torch.randn(2, 13)).square().mul(torch.randn(13)).mean())
            engine.step()
        found.append(weights(engine))
        engine.destroy()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_chunk_size_of_state_on_disk_changes_no_bits(ranks: int, tmp_path: Path) -> None:
    first, *others = run_ranks(ranks, pieces, str(tmp_path), [0, 1, 100, 300, 1_000_000])[0]
    assert all(same(first, other) for other in others)


def gathers(reuse: list[float]) -> list[int]:
    """Return the number of gathers that the third step takes for each reuse distance."""
    counts = []
    for distance in reuse:
        engine = build(3, zero_optimization={"stage3_max_reuse_distance": distance})
        train(engine, 2)
        before = traffic.calls["gather"]
        train(engine, 1)
        counts.append(traffic.calls["gather"] - before)
    return counts


def test_units_reused_within_the_reuse_distance_are_gathered_once() -> None:
    without, some, every = run_ranks(2, gathers, [0, 700, 1e9])[0]
    units = 4
    assert without == 2 * units
    assert every == units
    assert every < some < without


def persistent(at_most: list[int]) -> list[int]:
    """Return the number of elements that stay whole under each cap."""
    counts = []
    for cap in at_most:
        engine = build(3, zero_optimization={"stage3_param_persistence_threshold": 30,
                                             "stage3_model_persistence_threshold": cap})
        assert engine.sharded is not None
        counts.append(sum(unit.layout.elements for unit in engine.sharded.units if unit.name.endswith("small")))
    return counts


def test_small_parameters_stay_gathered_up_to_the_persistence_total() -> None:
    total = sum(p.numel() for p in Plain().parameters() if p.numel() <= 30)
    assert run_ranks(2, persistent, [10**9, 50, 0])[0] == [total, 49, 0]


def messages(bucket: int) -> int:
    from shoal.transport import collectives

    counted: list[int] = []
    split = collectives.chunks
    engine = build(0, zero_optimization={"reduce_bucket_size": bucket})
    value = loss(engine, 0)
    collectives.chunks = lambda *args, **kwargs: counted.append(len(sizes := split(*args, **kwargs))) or sizes
    engine.backward(value)
    collectives.chunks = split
    return max(counted)


def test_reductions_are_sent_in_chunks_of_the_bucket_size() -> None:
    elements = sum(p.numel() for p in Plain().blocks[0].parameters())
    assert run_ranks(2, messages, 100)[0] >= elements // 100


def refuse_unused() -> None:
    allowed = {"zero_optimization": {"ignore_unused_parameters": False}}
    for stage in (0, 2, 3):
        engine = build(stage, "unused", **allowed)
        before = weights(engine)
        engine.backward(loss(engine, 0))
        with pytest.raises(UsageError, match=r"step: on no rank did the loss depend on spare, blocks\.1\.spare, "
                                             r"blocks\.3\.norm\.weight.* and \d more, .*requires_grad_\(False\)"):
            engine.step()
        assert same(before, weights(engine)) and engine.global_steps == 0
        train(build(stage, "frozen", **allowed), 2)


def test_unused_parameters_are_refused_by_name_if_configured() -> None:
    run_ranks(2, refuse_unused)


def one_rank_only() -> list[float]:
    """Only rank 0's loss depends on the block: it did receive a gradient, so nothing is unused."""
    engine = build(2, "sometimes", zero_optimization={"ignore_unused_parameters": False})
    engine.module.calls = 0 if dist.get_rank() else 1
    return train(engine, 1)


def test_a_parameter_that_one_rank_used_is_not_unused() -> None:
    run_ranks(2, one_rank_only)


def overflowing(extra: dict[str, Any]) -> tuple[bool, bool, float]:
    engine = build(1, **extra)
    before = weights(engine)
    poisoned = loss(engine, 0) * (1e9 if dist.get_rank() == 1 else 1)
    engine.backward(poisoned)
    engine.step()
    return engine.was_step_applied(), same(before, weights(engine)), engine.skipped_steps


def test_fp16_communication_of_fp32_training_checks_overflow() -> None:
    assert run_ranks(2, overflowing, {"communication_data_type": "fp16", "gradient_clipping": 0}) == [(False, True, 1)] * 2
    assert run_ranks(2, overflowing, {"gradient_clipping": 0}) == [(True, False, 0)] * 2


def test_log_level_sets_the_library_logger(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogger("shoal").level
    try:
        run_alone(log_level="error")
        assert logging.getLogger("shoal").level == logging.ERROR
        run_alone()
        assert logging.getLogger("shoal").level == logging.ERROR
    finally:
        logging.getLogger("shoal").setLevel(before)


def run_alone(**extra: Any) -> Engine:
    return shoal.initialize(model=model(), config=configured(**extra))[0]


def test_dump_state_and_steps_per_print_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shoal"):
        engine = run_alone(dump_state=True, steps_per_print=2)
        train(engine, 4)
    assert sum("configuration: " in line for line in caplog.messages) == 1
    assert [line.partition(",")[0] for line in caplog.messages if line.startswith("step=")] == ["step=2", "step=4"]


def test_initialize_passes_the_timeout_to_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    start = dist.init_process_group
    if dist.is_initialized():
        dist.destroy_process_group()
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: waits.append(k["timeout"]) or start(*a, **k))
    run_alone(timeout=33)
    dist.destroy_process_group()
    config = configured()
    del config["timeout"]
    shoal.initialize(model=model(), config=config)
    dist.destroy_process_group()
    assert [wait.total_seconds() for wait in waits] == [33, 600]


def test_gradient_clipping_equals_torch() -> None:
    engine, plain = run_alone(gradient_clipping=0.01, optimizer={"type": "SGD", "params": {"lr": 1.0}}), model()
    value = loss(engine, 0)
    engine.backward(value)
    engine.step()
    from ..zero.models import batch, loss_of

    tokens, targets = batch(0, 0, 0)
    loss_of(plain(tokens), targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-6)
    for mine, theirs in zip(engine.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.allclose(mine.detach(), theirs.detach() - theirs.grad, atol=1e-8)
