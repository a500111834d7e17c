"""A small language model as a list of layers, and its training by an engine on a mesh and by plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shoal

WIDTH, WORDS, BLOCKS, LR = 12, 17, 4, 1e-2
MICRO, COUNT, STEPS = 2, 4, 3
"""Samples of a microbatch, microbatches of a step, steps."""


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(16, WIDTH) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places[:tokens.shape[1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.words = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().reshape(-1, WORDS), labels.reshape(-1))


def layers(*, tied: bool = True) -> list[shoal.LayerSpec]:
    """Return the layers, with or without the head's matrix tied to the embedding."""
    if not tied:
        return [shoal.LayerSpec(Embed), *(shoal.LayerSpec(Block) for _ in range(BLOCKS)), shoal.LayerSpec(Head)]
    return [shoal.TiedLayerSpec("words", Embed, tied_weight_attr="words.weight"),
            *(shoal.LayerSpec(Block) for _ in range(BLOCKS)),
            shoal.TiedLayerSpec("words", Head, tied_weight_attr="words.weight")]


def microbatch(step: int, number: int, rank: int, *, length: int = 6) -> tuple[Tensor, Tensor]:
    """Return one microbatch of a data rank."""
    generator = torch.Generator().manual_seed(step * 1000 + number * 10 + rank)
    tokens = torch.randint(0, WORDS, (MICRO, length), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The settings of one training."""

    stages: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    zero: int = 0
    tied: bool = True
    dtype: str = "fp32"
    clipping: float = 0.5
    interval: int = 0
    config: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def settings(self) -> dict[str, Any]:
        scale = {"loss_scale": 128} if self.dtype == "fp16" else {}
        return {
            "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": COUNT, "timeout": 30,
            "gradient_clipping": self.clipping, "zero_optimization": {"stage": self.zero},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
            "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32",
            **({self.dtype: {"enabled": True, **scale}} if self.dtype != "fp32" else {}), **self.config,
        }

    def module(self) -> shoal.PipelineModule:
        return shoal.PipelineModule(layers(tied=self.tied), num_stages=self.stages, loss_fn=loss_fn, seed_layers=True,
                                    schedule=self.schedule, stages_per_rank=self.stages_per_rank,
                                    activation_checkpoint_interval=self.interval)


@dataclass
class Result:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def data(step: int, rank: int, count: int = COUNT) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the microbatches of one step of a data rank."""
    return (microbatch(step, number, rank) for number in range(count))


def train(case: Case, steps: int = STEPS) -> Result:
    """Train with an engine; every rank returns the losses and norms, rank 0 also the weights."""
    engine, *_ = shoal.initialize(model=case.module(), config=case.settings)
    losses = [engine.train_batch(data(step, engine.mesh.rank("data"))).item() for step in range(steps)]
    norms = [engine.get_global_grad_norm()]
    return Result(losses, norms, engine.consolidated_state_dict(torch.float32) or {})


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1)


def train_plain(case: Case, ranks: int, steps: int = STEPS,
                make: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = adamw) -> Result:
    """Train with plain PyTorch in one process and fp32, on the samples of `ranks` data ranks."""
    model = nn.Sequential()
    for number, spec in enumerate(layers(tied=case.tied)):
        torch.manual_seed(1234 + number)
        model.append(spec.build())
    if case.tied:
        model[-1].words.weight = model[0].words.weight
    optimizer = make(model.parameters())
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for rank in range(ranks):
            for tokens, labels in data(step, rank):
                loss = loss_fn(model(tokens), labels) / (COUNT * ranks)
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms = [nn.utils.clip_grad_norm_(model.parameters(), case.clipping or float("inf")).item()]
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})
