"""Rare uses of the engine: second derivatives, fp64, two engines over one model, damaged values of a checkpoint."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.engine.engine import Engine
from shoal.errors import CheckpointError, UsageError
from shoal.testing import run_ranks
from shoal.tier import pages


def engine_of(model: nn.Module, stage: int, **extra: Any) -> Engine:
    return shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "gradient_clipping": 0, "timeout": 20,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **extra})[0]


def mlp(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def weights(model: nn.Module) -> list[Tensor]:
    with shoal.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def _images(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step)).to(dtype) for step in range(3)]


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, affine=False), nn.Flatten(),
                         nn.Linear(64, 2))


def batch_norm_of_16_bits(stage: int) -> tuple[list[float], list[torch.dtype]]:
    model = _convolutions()
    engine = engine_of(model, stage, bf16={"enabled": True})
    for x in _images(torch.bfloat16):
        engine.backward(engine(x).float().square().mean())
        engine.step()
    engine.eval()
    losses = [engine(x).float().square().mean().item() for x in _images(torch.bfloat16)]
    return losses, [buffer.dtype for name, buffer in model.named_buffers() if "running" in name]


@pytest.mark.parametrize("stage", range(4))
def test_a_batch_norm_trains_in_bf16_with_statistics_like_its_weights(stage: int) -> None:
    model = _convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in _images(torch.float32):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    expected = [model.eval()(x).square().mean().item() for x in _images(torch.float32)]
    for losses, dtypes in run_ranks(1, batch_norm_of_16_bits, stage):
        assert losses == pytest.approx(expected, rel=0.1)
        assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def penalised(stage: int) -> list[Tensor]:
    model = mlp()
    engine = engine_of(model, stage)
    for _ in range(2):
        x = torch.ones(2, 8, requires_grad=True)
        out = engine(x)
        (slope,) = torch.autograd.grad(out.pow(2).mean(), x, create_graph=True)
        engine.backward(out.mean() + slope.pow(2).sum())
        engine.step()
    return weights(model)


def penalties_agree() -> None:
    expected = mlp()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.ones(2, 8, requires_grad=True)
        out = expected(x)
        (slope,) = torch.autograd.grad(out.pow(2).mean(), x, create_graph=True)
        (out.mean() + slope.pow(2).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in (0, 2, 3):
        found = penalised(stage)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected.parameters(), strict=True)), stage


def test_a_gradient_penalty_trains_as_in_plain_pytorch() -> None:
    run_ranks(2, penalties_agree)


def frozen_pages() -> None:
    """Freeze the last block, in memory whose pages are released and would read as zeros."""
    pages.PAGED_FROM = 0
    found = []
    for stage in (0, 3):
        model = mlp(64)
        model[2].requires_grad_(False)
        engine = engine_of(model, stage)
        engine.backward(engine(torch.ones(2, 64)).pow(2).sum())
        engine.step()
        found.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_paged_memory_is_gathered_before_autograd_reads_it() -> None:
    run_ranks(2, frozen_pages)


def doubles() -> None:
    model, expected = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
    expected.load_state_dict(model.state_dict())
    engine = engine_of(model, 1, gradient_clipping=1.0, gradient_accumulation_steps=3)
    x = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3)
    for _ in range(3):
        assert engine.backward(engine(x).pow(2).mean()).dtype == torch.float64
        engine.step()
    expected(x).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(weights(model), expected.parameters(), strict=True))


def test_an_fp64_model_trains_in_fp64() -> None:
    run_ranks(1, doubles)


def in_float8() -> None:
    """A loss and an export in float8, of weights that an accumulation of two microbatches steps."""
    engine = engine_of(mlp(), 0, gradient_accumulation_steps=2)
    for _ in range(2):
        loss = engine(torch.ones(2, 8)).square().mean().to(torch.float8_e5m2)
        share = engine.backward(loss)
        assert share.dtype == torch.float32 and share == loss.float() / 2
        engine.step()
    assert not torch.equal(weights(engine.module)[0], weights(mlp())[0])
    exported = engine.consolidated_state_dict(torch.float8_e5m2) or {}
    assert exported["0.weight"].dtype == torch.float8_e5m2
    assert torch.equal(exported["0.weight"].float(), weights(engine.module)[0].to(torch.float8_e5m2).float())


def test_a_loss_and_an_export_may_be_in_float8() -> None:
    run_ranks(1, in_float8)


def twice(stage: int) -> None:
    model = mlp()
    engine = engine_of(model, stage)
    with pytest.raises(UsageError, match=r"parameter 'weight' belongs to another engine already; call destroy"):
        engine_of(model[0], stage)
    again = engine_of(model, stage)  # as by a cell of a notebook that is run again
    again.backward(again(torch.ones(2, 8)).mean())
    again.step()
    with pytest.raises(UsageError, match="this engine was destroyed"):
        engine(torch.ones(2, 8))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_has_one_engine_at_a_time(stage: int) -> None:
    run_ranks(1, twice, stage)


def copies(stage: int) -> None:
    """A copy of the module is plain, and torch.export takes it."""
    engine = engine_of(mlp(), stage)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"this Engine can be neither copied nor pickled: copy engine\.module"):
            call(engine)
    x = torch.ones(2, 8)
    with shoal.gathered(engine.module):
        plain = copy.deepcopy(engine.module)
        with pytest.raises(UsageError, match=r"Give torch\.export, .*, a copy\.deepcopy of the model"):
            torch.export.export(engine.module, (x,))
    assert torch.equal(torch.export.export(plain, (x,)).module()(x), engine(x))


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_is_not_copied_but_its_module_is_and_exports(stage: int) -> None:
    run_ranks(1, copies, stage)


def manual_boundary() -> None:
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    engine = engine_of(model, 1, gradient_accumulation_steps=2)
    for micro in range(2):
        engine.set_gradient_accumulation_boundary(micro == 1)
        engine.zero_grad()
        engine.backward(engine(torch.ones(2, 2)).mean())
        engine.step()
    assert torch.allclose(before - weights(model)[0], torch.full((1, 2), 0.1))


def test_zero_grad_keeps_gradients_where_boundaries_are_set_by_hand() -> None:
    run_ranks(1, manual_boundary)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Adds(nn.Linear):
    def forward(self, pair: Pair) -> Tensor:  # type: ignore[override]
        return super().forward(pair.first + pair.second)


def casting() -> None:
    engine = engine_of(Adds(2, 2), 0, fp16={"enabled": True, "auto_cast": True})
    assert engine(Pair(torch.ones(2, 2), torch.ones(2, 2))).dtype == torch.float16


def test_auto_cast_reaches_into_named_tuples() -> None:
    run_ranks(1, casting)


def damaged(folder: str) -> None:
    engine = engine_of(mlp(), 2)
    engine.backward(engine(torch.ones(2, 8)).mean())
    engine.step()
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    if dist.get_rank() == 0:
        path = Path(folder) / "global_step1" / "rank00000-000.safetensors"
        data = bytearray(path.read_bytes())
        data[-50] ^= 1
        path.write_bytes(data)
    dist.barrier()
    other = engine_of(mlp(), 2)
    with pytest.raises(CheckpointError, match="damaged"):
        other.load_checkpoint(folder)
    assert other.global_steps == 0


def test_damaged_checkpoint_values_raise_on_all_ranks_before_any_change(tmp_path: Path) -> None:
    run_ranks(2, damaged, str(tmp_path))
