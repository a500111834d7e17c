"""The published tiled computations train as the whole computation does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shoal.compat.deepspeed as deepspeed
from shoal.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from shoal.testing import run_ranks

WIDTH, WORDS, LENGTH, SHARDS = 4, 11, 6, 3


class Block(nn.Module):
    """An MLP as models of transformers have it, whose forward scripts replace."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def mlp_in_tiles(self: Block, x: Tensor) -> Tensor:
    return TiledMLP.apply(Block.forward, self, x, SHARDS, [self.down.weight, self.up.weight])


def block_by_keywords(self: Block, x: Tensor) -> Tensor:
    return sequence_tiled_compute(Block.forward, x.shape[1], SHARDS, {"x": x}, {"self": self}, "x",
                                  [self.down.weight], output_unshard_dimension=1, output_reduction=None)


def block_by_apply(self: Block, x: Tensor) -> Tensor:
    return SequenceTiledCompute.apply(Block.forward, x.shape[1], SHARDS, ["x"], ["self"], "x", [self.down.weight], 1, None,
                                      x, self)


class Language(nn.Module):
    """Embeds, runs blocks by `block`, and takes the loss by `loss`."""

    def __init__(self, block: Callable[[Block, Tensor], Tensor], loss: Callable[..., Tensor]):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.block, self.loss = block, loss

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + self.block(block, x)
        return x

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.hidden(ids)
        return x if targets is None else self.loss(self, x, targets)


def losses(self: Language, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    each = F.cross_entropy(self.lm_head(x).view(-1, WORDS), y.view(-1), reduction="none")
    return each.sum() if mask is None else (each * mask.view(-1)).sum()


def some(y: Tensor) -> Tensor:
    return (y % 2 == 0).float()


def whole_loss(self: Language, x: Tensor, y: Tensor) -> Tensor:
    return losses(self, x, y, some(y)) / 7


def tiled_loss(self: Language, x: Tensor, y: Tensor) -> Tensor:
    return TiledFusedLogitsLoss.apply(losses, self, x, y, some(y), SHARDS, self.lm_head.parameters(), "sum") / 7


def loss_by_keywords(self: Language, x: Tensor, y: Tensor) -> Tensor:
    return sequence_tiled_compute(losses, x.shape[1], 4, {"x": x, "y": y, "mask": some(y)}, {"self": self}, "x",
                                  [self.lm_head.weight], output_unshard_dimension=0, output_reduction="sum") / 7


def train(stage: int, model: Language, *, outside: bool = False) -> dict[str, Tensor]:
    engine: Any = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True})[0]
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(WORDS, (2, LENGTH))
        loss = model.loss(engine.module, engine(ids), ids.roll(-1, 1)) if outside else engine(ids, ids.roll(-1, 1))
        engine.backward(loss)
        engine.step()
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def forms_train_alike() -> None:
    wanted = train(0, Language(Block.forward, whole_loss))
    for stage in (0, 3):
        for block, loss in ((mlp_in_tiles, tiled_loss), (block_by_keywords, loss_by_keywords), (block_by_apply, tiled_loss)):
            for outside in (False, True):
                found = train(stage, Language(block, loss), outside=outside)
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_tiles_train_as_the_whole_at_stages_0_and_3() -> None:
    run_ranks(2, forms_train_alike)


@pytest.mark.parametrize("needs", [False, True])
def test_a_scaled_mean_of_tiles_has_the_gradients_of_the_whole(needs: bool) -> None:
    torch.manual_seed(0)
    head, x, y = nn.Linear(WIDTH, WORDS), torch.randn(2, LENGTH, WIDTH), torch.randint(WORDS, (2, LENGTH))
    found: list[list[Tensor]] = []
    for tiled in (False, True):
        head.zero_grad()
        mine = x.clone().requires_grad_(needs)
        mean = partial(lambda layer, x, y: F.cross_entropy(layer(x).view(-1, WORDS), y.view(-1)))
        loss = TiledFusedLogitsLoss.apply(mean, head, mine, y, None, 4, None, "mean") if tiled else mean(head, mine, y)
        (loss * 3).backward()
        found.append([loss.detach(), *(each.grad for each in (*head.parameters(), *([mine] if needs else []))
                                       if each.grad is not None)])
    torch.testing.assert_close(found[1], found[0])


X = torch.ones(2, LENGTH, WIDTH)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: TiledMLP.apply(lambda self, x: x, None, X, 0), "shards: got 0"),
    (lambda: TiledMLP.apply(lambda self, x: x[:, :1], None, X, 2), "made 2 positions of 6"),
    (lambda: TiledFusedLogitsLoss.apply(losses, None, X, X[:, 1:], None, 2), "all begin with"),
    (lambda: TiledFusedLogitsLoss.apply(lambda self, x, y: x.sum(), None, X, X, None, 2, [], "max"), "got 'max'"),
    (lambda: sequence_tiled_compute(len, 5, 2, {"x": X}, {}, "x"), r"give a tensor \(batch, 5, ...\)"),
    (lambda: sequence_tiled_compute(len, LENGTH, 2, {"x": X}, {}, "y"), "choose one of x"),
])
def test_a_wrong_tiled_call_is_a_value_error(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


class Normed(nn.Module):
    """A layer with running statistics, computed whole tile by tile."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).flatten(0, -2)).view_as(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self(x) - y).square().mean()


@pytest.mark.parametrize("call", [
    lambda module, x: TiledMLP.apply(Normed.forward, module, x, SHARDS).square().mean(),
    lambda module, x: TiledFusedLogitsLoss.apply(Normed.loss, module, x, torch.zeros_like(x), None, SHARDS),
    lambda module, x: sequence_tiled_compute(Normed.loss, LENGTH, SHARDS, {"x": x, "y": x * 0}, {"self": module}, "x"),
    lambda module, x: sequence_tiled_compute(module.loss, LENGTH, SHARDS, {"x": x, "y": x * 0}, {}, "x"),
], ids=["mlp", "loss", "keywords", "method"])  # fmt: skip
def test_running_statistics_of_tiles_count_once(call: Callable[[Normed, Tensor], Tensor]) -> None:
    module, plain = Normed(), Normed()
    x = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    call(module, x).backward()
    torch.stack([plain(tile).square().mean() for tile in x.chunk(SHARDS, 1)]).mean().backward()
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name))
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
