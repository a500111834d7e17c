"""Blocks that draw, write in place, keep state or use rare tensors train bit by bit under every rest as without one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.testing import run_ranks

WIDTH, ROWS, BLOCKS, STEPS = 32, 600, 3, 2


class _Draws(nn.Module):
    """A block that draws from the named random state."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with shoal.checkpointing.get_cuda_rng_tracker().fork():
            return x + torch.nn.functional.dropout(self.up(x), 0.3).tanh()


class _Normalizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nn.functional.gelu(self.norm(self.up(x)))


class _WritesInPlace(nn.Module):
    """A block with `nn.ReLU(inplace=True)` behind a product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.relu(self.up(x)))


class _WritesToProducts(nn.Module):
    """A block that writes to products through `_unsafe_view`, as `F.linear` without bias and `torch.matmul` return them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.view(4, -1, WIDTH)
        scores = torch.matmul(self.up(hidden).sub_(0.5).sin(), self.down.weight)
        scores += self.down.bias
        return x + scores.tanh().view(x.shape)


class _WritesToChunks(nn.Module):
    """A block that writes to parts of a product that count versions apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).unsafe_chunk(2, -1)
        gate = gate.sigmoid_()
        value = value.tanh_()
        return x + self.down(gate * value)


class _Recurs(nn.Module):
    """A block around `nn.GRU`, whose cells write to parts of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x.view(-1, 2, WIDTH))[0].reshape(x.shape)


class _RecursByCells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = self.first(x, (x.sin(), x.cos()))
        return x + self.second(hidden, state)


class _DrawsElsewhere(nn.Module):
    """A block that draws from the generators of Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.up(x) * (1 + random.random() + numpy.random.rand())).tanh()


class _ReadsItsBuffers(nn.Module):
    """A block with buffers that its forward updates and reads; two modules share one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Module()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.norm.register_buffer("mean", self.mean)
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.gelu(self.up(x))
        self.mean.lerp_(y.detach().mean(0), 0.1)
        self.steps = self.steps + 1
        return x + (y - self.norm.mean) / self.steps * y


class _MultipliesSparse(nn.Module):
    """A block in which autograd saves a sparse matrix, and a product of two."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        matrix = (torch.eye(WIDTH) * 2).to_sparse()
        return x + torch.sparse.mm(torch.sparse.mm(matrix, matrix), self.up(x).t()).t().tanh()


class _DifferentiatesForward(nn.Module):
    """A block that takes a derivative by forward mode, in which autograd saves zeros without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(torch.func.jvp(lambda y: self.down(self.up(y).tanh()), (x,), (torch.ones_like(x),)))


_KINDS = {"draws": _Draws, "elsewhere": _DrawsElsewhere, "buffers": _ReadsItsBuffers, "sparse": _MultipliesSparse,
          "jvp": _DifferentiatesForward, "normalizes": _Normalizes, "writes": _WritesInPlace, "products": _WritesToProducts,
          "chunks": _WritesToChunks, "gru": _Recurs, "cells": _RecursByCells}
_MARKS = {"sparse": pytest.mark.host("the late device has no sparse products"),
          **dict.fromkeys(("gru", "cells"), pytest.mark.host("the late device has no fused cells"))}


def _states(kind: str, section: dict[str, Any], stage: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = nn.Sequential(*[_KINDS[kind]() for _ in range(BLOCKS)])
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "log_level": "error", "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": section})[0]
    shoal.checkpointing.model_parallel_cuda_manual_seed(7)
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(ROWS, WIDTH)).square().mean())
        engine.step()
    engine.destroy()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("section", [{"recompute": "full"}, {"recompute": "selective"}, {"budget": "1GB"},
                                     {"rest": "nvme"}], ids=str)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=_MARKS.get(kind, ())) for kind in _KINDS])
def test_blocks_that_draw_or_write_train_bitwise_as_kept(kind: str, section: dict[str, Any], tmp_path: Path) -> None:
    section = section | ({"nvme_path": str(tmp_path)} if "rest" in section else {})
    kept, found = run_ranks(1, _states, kind, {})[0], run_ranks(1, _states, kind, section)[0]
    assert [name for name, value in kept.items() if not torch.equal(value, found[name])] == []


@_MARKS["sparse"]
def test_stage_3_keeps_sparse_tensors_as_they_are() -> None:
    kept, found = run_ranks(1, _states, "sparse", {})[0], run_ranks(1, _states, "sparse", {}, 3)[0]
    assert all(map(torch.equal, kept.values(), found.values()))
