"""When backward leaves a module its units are reduced and released, also where parameters received no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

WIDTH, DEPTH, RATE = 16, 8, 0.1


class Block(nn.Module):
    """Two layers, the second of which may be skipped, and a second output, for an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.skips = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        return (x if self.skips else self.second(x)), x.pow(2).mean()


class Stack(nn.Module):
    """Blocks one after the other; the auxiliary losses are added at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        extra: list[Tensor] = []
        for block in self.blocks:
            x, loss = block(x)
            extra.append(loss)
        return x.pow(2).mean() + torch.stack(extra).sum()


def built(stage: int) -> tuple[Stack, Any]:
    torch.manual_seed(0)
    model = Stack()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "timeout": 10,
              "optimizer": {"type": "SGD", "params": {"lr": RATE}},
              "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": 0}}
    return model, shoal.initialize(model=model, config=config)[0]


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def skips(step: int, rank: int) -> list[int]:
    """Blocks whose second layer `rank` does not use in `step`."""
    return [[7], [6, 2]][rank] if step % 2 == 0 else [[], [5]][rank]


def trained(stage: int) -> dict[str, Tensor]:
    model, engine = built(stage)
    for step in range(4):
        for index, block in enumerate(model.blocks):
            block.skips = index in skips(step, dist.get_rank())
        engine.backward(engine(inputs(step, dist.get_rank())))
        engine.step()
    with shoal.gathered(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(4):
        for rank in range(2):
            for index, block in enumerate(model.blocks):
                block.skips = index in skips(step, rank)
            (model(inputs(step, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("stage", range(4))
def test_ranks_may_use_different_parameters_of_a_block(stage: int) -> None:
    wanted = plain()
    for name, found in run_ranks(2, trained, stage)[0].items():
        torch.testing.assert_close(found, wanted[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


class Residual(nn.Module):
    """A block that may pass its input on as it is: the same tensor is then the output of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.drops = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.drops else x + torch.tanh(self.layer(x))


def dropped(step: int, rank: int) -> list[int]:
    return [[[DEPTH - 1], [3, 4]], [[], [DEPTH - 1]], [[0, 5], [5]]][step % 3][rank]


def residual(model: nn.Module, step: int, rank: int) -> Tensor:
    for index, block in enumerate(model.children()):
        block.drops = index in dropped(step, rank)
    return inputs(step, rank)


def trained_residual(stage: int) -> tuple[dict[str, Tensor], list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(DEPTH)))
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "timeout": 10,
              "optimizer": {"type": "SGD", "params": {"lr": RATE}},
              "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": 0}}
    engine = shoal.initialize(model=model, config=config)[0]
    reductions: list[int] = []
    for step in range(6):
        engine(inputs(step, 0)).sum()  # a graph that no backward goes through
        before = traffic.calls["reduce"]
        x = residual(model, step, dist.get_rank())
        engine.backward(engine(x).pow(2).mean())
        reductions.append(traffic.calls["reduce"] - before)
        engine.step()
    with shoal.gathered(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, reductions


def plain_residual() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(DEPTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(6):
        for rank in range(2):
            (model(residual(model, step, rank)).pow(2).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("stage", range(3))
def test_ranks_may_drop_different_blocks_and_reduce_each_once(stage: int) -> None:
    wanted = plain_residual()
    for weights, reductions in run_ranks(2, trained_residual, stage):
        assert reductions == [DEPTH] * 6
        for name, found in weights.items():
            assert torch.allclose(found, wanted[name], rtol=1e-5, atol=1e-6), name


def reductions_under_way() -> list[int]:
    """Return the number of reduced units at the start of each block's backward; one parameter is never used."""
    model, engine = built(2)
    model.blocks[DEPTH - 1].skips = True
    counts: list[int] = []
    gradients = [unit.gradient for unit in engine.sharded.units]
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, output: output[0].register_hook(
            lambda _gradient: counts.append(sum(gradient.reduced_in_pass for gradient in gradients))) and None)
    engine.backward(engine(inputs(0, dist.get_rank())))
    return counts


def test_an_unused_parameter_does_not_delay_other_reductions() -> None:
    counts = run_ranks(2, reductions_under_way)[0]
    assert counts == sorted(counts)
    assert counts[-1] >= DEPTH - 2
