"""What a script of plain PyTorch expects beside the loop: norms, buffers, notebooks, Hugging Face folders, plain answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import CheckpointError, UsageError
from shoal.testing import run_ranks


def config(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "timeout": 20,
            "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def norms(stage: int, accumulation: int) -> list[float | None]:
    engine = shoal.initialize(model=model(), config=config(stage, gradient_accumulation_steps=accumulation))[0]
    found = [engine.get_global_grad_norm()]
    for step in range(2 * accumulation):
        engine.backward(engine(batch(step, 0)).square().mean())
        engine.step()
        if step % accumulation == accumulation - 1:
            found.append(engine.get_global_grad_norm())
    return found


def all_norms() -> list[list[float | None]]:
    return [norms(stage, accumulation) for stage in range(4) for accumulation in (1, 2)]


def test_the_norm_is_known_without_clipping_too() -> None:
    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    expected: list[list[float]] = []
    for accumulation in (1, 2):
        whole = model()
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        expected.append([])
        for step in range(2 * accumulation):
            (whole(batch(step, 0)).square().mean() / accumulation).backward()
            if step % accumulation == accumulation - 1:
                grads = [p.grad for p in whole.parameters() if p.grad is not None]
                expected[-1].append(nn.utils.get_total_norm(grads).item())
                optimizer.step()
                optimizer.zero_grad()
    for found in run_ranks(2, all_norms):
        for index, values in enumerate(found):
            assert values == [None, *(pytest.approx(norm, rel=1e-5) for norm in expected[index % 2])]


def running_statistics(*, broadcast: bool) -> list[list[Tensor]]:
    found: list[list[Tensor]] = []
    for stage in (0, 3):
        whole = model()
        engine = shoal.initialize(model=whole, config=config(stage, broadcast_buffers=broadcast))[0]
        for step in range(3):
            engine.backward(engine(batch(step, engine.global_rank)).square().mean())
            engine.step()
        found.append([buffer.clone() for buffer in whole.buffers()])
    return found


def statistics_of(rank: int) -> list[Tensor]:
    """The statistics of one rank of two, in plain torch: gradients are averaged, buffers are not."""
    replicas = [model(), model()]
    for step in range(3):
        for index, replica in enumerate(replicas):
            replica(batch(step, index)).square().mean().backward()
        for ours, theirs in zip(*(replica.parameters() for replica in replicas), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            mean = (ours.grad + theirs.grad) / 2
            for p in (ours, theirs):
                p.data -= 0.1 * mean
                p.grad = None
    return list(replicas[rank].buffers())


def test_statistics_of_batch_norm_are_those_of_rank_0_or_kept() -> None:
    shared, kept = (run_ranks(2, running_statistics, broadcast=broadcast) for broadcast in (True, False))
    for rank in range(2):
        for found, expected in ((shared[rank], statistics_of(0)), (kept[rank], statistics_of(rank))):
            for values in found:
                for value, other in zip(values, expected, strict=True):
                    torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def plain_answers(folder: str) -> None:
    with pytest.raises(UsageError, match=r"model is the class Linear; pass an instance, model=Linear\(\.\.\.\)"):
        shoal.initialize(model=nn.Linear, config=config())  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match=r"model is a function; pass an instance of torch\.nn\.Module"):
        shoal.initialize(model=model, config=config())  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match=r"no parameter of the Sequential .* all are frozen"):
        shoal.initialize(model=model().requires_grad_(False), config=config())
    engine = shoal.initialize(model=model(), config=config())[0]
    with pytest.raises(UsageError, match=r"model is an engine; pass the module .*, engine\.module"):
        shoal.initialize(model=engine, config=config())
    assert engine.load_checkpoint(folder) == (None, None)
    for tag in ("first", "second"):
        engine.backward(engine(batch(0, 0)).sum())
        engine.step()
        engine.save_checkpoint(folder, tag, save_latest=False)
    engine.wait_for_checkpoint()
    with pytest.raises(CheckpointError, match=r"has no file 'latest'.* newest intact checkpoint is 'second': load it with"):
        engine.load_checkpoint(folder)


def test_wrong_models_frozen_models_and_a_lost_latest_say_so(tmp_path: Path) -> None:
    run_ranks(1, plain_answers, str(tmp_path))
