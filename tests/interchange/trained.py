"""A small model with a frozen, a shared and an odd-sized parameter, trained alike by Shoal and by DeepSpeed.

This file imports torch alone, because the environment of the peers reads it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

BEFORE, AFTER = 3, 2
"""Steps before and after the checkpoint."""
CLIENT = {"epoch": 3, "note": ["a", (1, 2.5)], "counts": torch.arange(3)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Maps 5 features to 3; `mid` and `tied` share a weight, `frozen` is not trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.mid = nn.Linear(7, 7, bias=False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.mid.weight
        self.last = nn.Linear(7, 3)
        self.register_buffer("gain", torch.full((3,), 0.5 + seed))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        return ((self.last(torch.tanh(self.tied(self.mid(x)))) * self.gain - y) ** 2).float().mean()


def groups(net: Net) -> list[dict[str, object]]:
    """Return two optimizer groups: matrices with decay, vectors without."""
    trained = [p for p in net.parameters() if p.requires_grad]
    return [{"params": [p for p in trained if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}]


def config(stage: int, dtype: str) -> dict[str, object]:
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01}},
            "zero_optimization": {"stage": stage}, **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
            **({"data_types": {"grad_accum_dtype": "fp32"}} if dtype == "bf16" and stage == 1 else {})}


def batch(step: int, rank: int, ranks: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Return this rank's share of the eight samples of a step."""
    random = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(8, 5, generator=random), torch.randn(8, 3, generator=random)
    mine = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    return x[mine].to(DTYPES[dtype]), y[mine].to(DTYPES[dtype])


class Bend(nn.Module):
    """A layer without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def unembed(layer: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.weight.t())


def pipeline_layers(layer: Callable[..., Any], tied: Callable[..., Any]) -> list[Any]:
    """Return the layers of a pipeline whose ends share a weight, from the classes of either library."""
    return [tied("emb", nn.Linear, 5, 7, bias=False, tied_weight_attr="weight"), layer(Bend), layer(nn.Linear, 7, 7), Bend(),
            layer(nn.Linear, 7, 7),
            tied("emb", nn.Linear, 5, 7, bias=False, forward_fn=unembed, tied_weight_attr="weight")]


def pipeline_config(stage: int, dtype: str) -> dict[str, object]:
    return {**config(stage, "fp32"), "gradient_accumulation_steps": 2, "scheduler": {},
            **({} if dtype == "fp32" else {dtype: {"enabled": True}})}


def microbatches(step: int, dtype: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the microbatches from step `step` on; the target of one has as many features as its input."""
    while True:
        for half in range(2):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 + 2 * step + half)).to(DTYPES[dtype])
            yield x, x.flip(1)
        step += 1
