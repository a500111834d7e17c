"""Models with sparse embeddings, and their training with row gradients beside dense gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.transport.collectives import traffic

WORDS, COLUMNS, TAKEN = 600, 24, 6
ROW = 4 * COLUMNS + 4


class Towers(nn.Module):
    """An embedding with a bag beside it, a block that has an embedding of its own, and a head."""

    def __init__(self, sparse: bool = True):
        super().__init__()
        self.embed = nn.Embedding(WORDS, COLUMNS, sparse=sparse)
        self.bag = nn.EmbeddingBag(WORDS + 1, COLUMNS, sparse=sparse, mode="mean")
        self.blocks = nn.ModuleList(Looking(sparse) for _ in range(2))
        self.head = nn.Linear(COLUMNS, 5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).mean(1) + self.bag(words)
        for block in self.blocks:
            x = block(x, words)
        return self.head(x)


class Looking(nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        self.linear = nn.Linear(COLUMNS, COLUMNS)
        self.words = nn.Embedding(WORDS, COLUMNS, sparse=sparse, padding_idx=3)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return self.linear(x) + self.words(words).sum(1)


class Alone(nn.Module):
    """One embedding and nothing else."""

    def __init__(self, sparse: bool = True, words: int = WORDS):
        super().__init__()
        self.embed = nn.Embedding(words, COLUMNS, sparse=sparse)

    def forward(self, words: Tensor) -> Tensor:
        return self.embed(words)


class Tied(nn.Module):
    """A head whose weight is the embedding's: as a module, or read by hand."""

    def __init__(self, by_hand: bool):
        super().__init__()
        self.embed = nn.Embedding(WORDS, COLUMNS, sparse=True)
        self.head = None if by_hand else nn.Linear(COLUMNS, WORDS, bias=False)
        if self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).mean(1)
        return nn.functional.linear(x, self.embed.weight) if self.head is None else self.head(x)


class Shared(nn.Module):
    """Two embeddings of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Embedding(WORDS, COLUMNS, sparse=True)
        self.passage = nn.Embedding(WORDS, COLUMNS, sparse=True)
        self.passage.weight = self.query.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.query(words[:, :2]).sum(1) * self.passage(words[:, 2:]).sum(1)


def some(step: int, micro: int) -> Tensor:
    """Return token ids; ranks look up mostly different rows, and the last rank one row many times in step 1."""
    random = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
    words = torch.randint(WORDS, (3, TAKEN), generator=random)
    return torch.full_like(words, WORDS - 1) if dist.get_rank() == dist.get_world_size() - 1 and step == 1 else words


def half(step: int, micro: int) -> Tensor:
    """Return token ids that cover a third of the table on every rank."""
    return torch.randperm(WORDS, generator=torch.Generator().manual_seed(step))[:WORDS // 3 * 3].view(3, -1)


def train(model: Callable[[], nn.Module], stage: int, sparse: bool, *, words: Callable[[int, int], Tensor] = some,
          steps: int = 3, optimizer: str = "Adagrad", zero: dict[str, Any] | None = None,
          used: Callable[[int], bool] = lambda step: True, **config: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Train a model, and return its weights and the bytes that this rank sent, by kind."""
    torch.manual_seed(0)
    module = model()
    engine = shoal.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": 3, "sparse_gradients": sparse, "timeout": 20, "gradient_clipping": 0.5,
        "optimizer": {"type": optimizer, "params": {"lr": 0.05}}, "zero_optimization": {"stage": stage, **(zero or {})},
        **config})[0]
    traffic.bytes.clear()
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            output = engine(words(step, micro))
            engine.backward(output.float().pow(2).sum() if used(step) else (output * 0).sum())
            engine.step()
    if stage < 3:
        module.state_dict()  # wait for what is under way
    sent = dict(traffic.bytes)
    with shoal.gathered(module):
        weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    engine.destroy()
    return weights, sent


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def beside_dense(model: Callable[[], nn.Module], stage: int, **more: Any) -> tuple[list[str], dict[str, int]]:
    """Train with row and with dense gradients; return the weights that differ, and the bytes that rows sent."""
    rows, sent = train(model, stage, True, **more)
    return differing(rows, train(model, stage, False, **more)[0]), sent
