"""What is trained: a model, and the same batches for every system.

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


class Chain(nn.Module):
    """`layers` times Linear and ReLU at a constant width: [rows, width] to [rows, width]."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def layers(*, layers: int = LAYERS, width: int = 64, rows: int = 16) -> Workload:
    """Describe the chain of small layers."""
    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED + 1000 * step + rank)
        x = torch.randn(2, rows, width, generator=generator)
        return x[0], x[1]

    return Workload(build=lambda: Chain(layers, width), blocks=lambda model: list(model.layers),  # type: ignore[arg-type]
                    batch=batch, loss=functional.mse_loss)


def gpt(preset: str, *, microbatch: int, length: int) -> Workload:
    """Describe examples/gpt's model of that preset on random tokens, `microbatch` sequences of `length`."""
    model = _example("gpt/model.py")

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED + 1000 * step + rank)
        tokens = torch.randint(model.VOCABULARY, (microbatch, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Workload(build=lambda: model.PRESETS[preset].build(), blocks=lambda gpt: list(gpt.blocks),  # type: ignore[arg-type]
                    batch=batch, loss=loss)


def workload(name: str, *, microbatch: int = 2, length: int = 128) -> Workload:
    """Return the workload called `layers`, or `gpt` of the preset `name`, built under one seed."""
    return layers() if name == "layers" else gpt(name, microbatch=microbatch, length=length)


def parameters(name: str) -> int:
    """Count the parameters of a workload's model without building it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in workload(name).build().parameters())


def _example(path: str) -> ModuleType:
    file = Path(__file__).parents[1] / "examples" / path
    specification = importlib.util.spec_from_file_location("example_" + file.stem, file)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module
