"""Small models, each with one thing that is hard for a sharded engine."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS = 12, 17


class Block(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, blocks: int = 3):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


class Tied(Plain):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class TiedAcrossBlocks(Plain):
    """Two blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Unused(Plain):
    """A block, a parameter of a block, and a parameter of the root that no forward touches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block())
        self.spare = nn.Parameter(torch.randn(5))
        self.blocks[1].spare = nn.Parameter(torch.randn(7))

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in list(self.blocks)[:-1]:
            x = block(x)
        return x


class Sometimes(Plain):
    """A block whose parameters receive gradients in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def hidden(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            if index != 1 or self.calls % 3 != 1:
                x = block(x)
        return x


class Frozen(Plain):
    """A frozen block, a frozen weight within a block, and a frozen embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_(False)


class FrozenLast(Plain):
    """The last block is frozen, and its output is the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)
        self.blocks.append(Block(WORDS))
        self.blocks[3].requires_grad_(False)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in list(self.blocks)[:-1]:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks[3](self.head(self.hidden(tokens)))


class Hidden:
    """An output that shows nothing of what it holds."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor):
        self.value = value


class Closed(Block):
    """A block that hands its result on in a closure, or behind slots, with something else beside it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Hidden, object]:  # type: ignore[override]
        result = super().forward(x)
        return x * 1.0, Hidden(result), lambda: result


class OddOutputs(Plain):
    """Results that no output hook sees, frozen and trainable, and a loss left on a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Closed() for _ in range(4))
        self.blocks[2].requires_grad_(False)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            _, hidden, closure = block(x)
            x = hidden.value if index % 2 else closure()
        return x


class Auxiliary(Plain):
    """Blocks leave a second loss, which the model adds."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, aux = self.embed(tokens), 0.0
        for block in self.blocks:
            x = block(x)
            aux = aux + block.up(torch.tanh(x)).pow(2).mean()
        return self.head(x) + aux


class CalledTwice(Plain):
    """Every block runs twice."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


class Recompute(Plain):
    """Every block is recomputed in backward."""

    reentrant = False

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class RecomputeReentrant(Recompute):
    """Recompute by a nested backward; one block runs twice."""

    reentrant = True

    def hidden(self, tokens: Tensor) -> Tensor:
        x = super().hidden(tokens)
        return checkpoint(self.blocks[0], x, use_reentrant=True)


class ReadElsewhere(Plain):
    """The forward of the root reads a weight of a block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.hidden(tokens)
        return self.head(x + (x @ self.blocks[0].up.weight.t()).mean(-1, keepdim=True))


class Mapping(Plain):
    """Blocks hand a dictionary on, and the output is one."""

    def forward(self, tokens: Tensor) -> dict[str, list[Tensor]]:
        return {"logits": [super().forward(tokens)]}


FEATURES = {
    "plain": Plain, "tied": Tied, "tied across blocks": TiedAcrossBlocks, "unused": Unused, "sometimes": Sometimes,
    "frozen": Frozen, "called twice": CalledTwice, "recompute": Recompute, "recompute, re-entrant": RecomputeReentrant,
    "frozen last": FrozenLast, "odd outputs": OddOutputs, "auxiliary": Auxiliary,
    "read elsewhere": ReadElsewhere, "mapping": Mapping,
}


def turn_of(feature: str, stage: int) -> int:
    """Return a number that tells which of several cases a test of `feature` at `stage` takes: any two of the three meet."""
    return [*FEATURES].index(feature) + stage


def loss_of(output: Tensor | dict[str, list[Tensor]], targets: Tensor) -> Tensor:
    logits = output["logits"][0] if isinstance(output, dict) else output
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(WORDS, (2, 6), generator=random)
    return tokens[:, :-1], tokens[:, 1:]
