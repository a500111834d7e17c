"""The workloads: a model, and the same batches for every system.

`gpt` is the model of examples/gpt on random tokens; `layers` is a chain of many small layers, where the cost of
sharding a layer shows and the arithmetic does not.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SEED = 1234
LAYERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and its data: `batch(step, rank)` is (inputs, targets), `blocks` are the modules worth sharding alone."""

    build: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], list[nn.Module]]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    chain: Callable[[nn.Module], list[nn.Module]]
    """The model as modules, each of which takes what the one before it gives: one tensor."""
    link_bytes: int
    """Bytes of that tensor, between two blocks, for the batch of one rank."""
    pieces: int = 1
    """Microbatches into which a pipeline cuts the batch of all ranks."""


class Chain(nn.Module):
    """`layers` times Linear and ReLU at a constant width: [rows, width] to [rows, width]."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Turned(nn.Module):
    """A block of the GPT that finds its rotary positions itself, so that its only input is the stream."""

    def __init__(self, block: nn.Module, rotation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block = block
        self.rotation = rotation

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.rotation(x))


def layers(*, layers: int = LAYERS, width: int = 64, rows: int = 16, pieces: int = 1) -> Workload:
    """Describe the chain of small layers."""
    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED + 1000 * step + rank)
        x = torch.randn(2, rows, width, generator=generator)
        return x[0], x[1]

    return Workload(build=lambda: Chain(layers, width), blocks=lambda model: list(model.layers),  # type: ignore[arg-type]
                    batch=batch, loss=functional.mse_loss, chain=lambda model: list(model.layers),  # type: ignore[arg-type]
                    link_bytes=4 * rows * width, pieces=pieces)


def gpt(preset: str, *, microbatch: int, length: int, pieces: int = 1) -> Workload:
    """Describe examples/gpt's model of that preset on random tokens, `microbatch` sequences of `length`."""
    model = _example("gpt/model.py")
    shape = model.PRESETS[preset]

    def rotation(x: Tensor) -> Tensor:
        return model.rotation(x.shape[1], shape.dim // shape.heads, x)

    def chain(gpt: Any) -> list[nn.Module]:
        return [gpt.embedding, *(Turned(block, rotation) for block in gpt.blocks), nn.Sequential(gpt.norm, gpt.head)]

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED + 1000 * step + rank)
        tokens = torch.randint(model.VOCABULARY, (microbatch, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Workload(build=shape.build, blocks=lambda gpt: list(gpt.blocks), batch=batch, loss=loss,  # type: ignore[arg-type]
                    chain=chain, link_bytes=4 * microbatch * length * shape.dim, pieces=pieces)


class Towers(nn.Module):
    """Similarity of queries and passages, both read by one bidirectional GRU over one embedding: [2 B, length] to [B, B]."""

    def __init__(self, words: int, columns: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, columns)
        self.gru = nn.GRU(columns, hidden, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor) -> Tensor:
        read = self.gru(self.embed(words))[0].mean(1)
        query, passage = functional.normalize(read, dim=-1).chunk(2)
        return 10 * query @ passage.t()


def towers(*, microbatch: int, length: int, words: int = 200_000, columns: int = 128, hidden: int = 64) -> Workload:
    """Describe the two towers on words by Zipf's law: word k is as frequent as 1/k, and the frequent ones come first."""
    frequency = (1 / torch.arange(1, words + 1, dtype=torch.float64)).cumsum(0)

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED + 1000 * step + rank)
        drawn = torch.rand(2 * microbatch, length, generator=generator, dtype=torch.float64) * frequency[-1]
        return torch.searchsorted(frequency, drawn).clamp_(max=words - 1), torch.arange(microbatch)

    return Workload(build=lambda: Towers(words, columns, hidden), blocks=lambda model: [], batch=batch,
                    loss=functional.cross_entropy, chain=lambda model: [model], link_bytes=4 * microbatch * microbatch)


def workload(name: str, *, microbatch: int = 2, length: int = 128, pieces: int = 1) -> Workload:
    """Return the workload called `layers` or `towers`, or `gpt` of the preset `name`, built under one seed."""
    if name == "towers":
        return towers(microbatch=microbatch, length=length)
    return layers(pieces=pieces) if name == "layers" else gpt(name, microbatch=microbatch, length=length, pieces=pieces)


def parameters(name: str) -> int:
    """Count the parameters of a workload's model without building it."""
    return sum(shape.numel() for shape in shapes(name))


def shapes(name: str) -> list[torch.Size]:
    """Return the shapes of the parameters of a workload's model without building it."""
    with torch.device("meta"):
        return [parameter.shape for parameter in workload(name).build().parameters()]


def _example(path: str) -> ModuleType:
    file = Path(__file__).parents[1] / "examples" / path
    specification = importlib.util.spec_from_file_location("example_" + file.stem, file)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module
