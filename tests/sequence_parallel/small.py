"""A small language model whose attention and loss work on a split sequence, as one module or as layers of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.attention import BigBirdSparsityConfig, Blocks, attend
from shoal.sequence_parallel import SequenceAxis, attend_sequence, cross_entropy
from shoal.tensor_parallel import Column, Plan, Row, parallelize

WORDS, WIDTH, HEADS, LENGTH, BLOCK = 19, 32, 4, 128, 16
PLAN = Plan({"*.query": Column(), "*.key": Column(), "*.value": Column(), "*.out": Row(), "*.up": Column(), "*.down": Row()})


class Embedding(nn.Module):
    """Words and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, positions = inputs
        return self.words(tokens) + self.places(positions)


class Block(nn.Module):
    """Attention over the whole sequence, and a feed-forward."""

    def __init__(self, axis: SequenceAxis | None, sparse: bool, dropout: float, tensor_rank: int) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.axis, self.dropout, self.tensor_rank = axis, dropout, tensor_rank
        self.blocks = (BigBirdSparsityConfig(HEADS, BLOCK, attention="unidirectional", num_random_blocks=0).blocks(LENGTH)
                       if sparse else None)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
                             for layer in (self.query, self.key, self.value))
        options: dict[str, Any] = {"causal": True, "dropout": self.dropout, "first_head": self.tensor_rank * query.shape[1]}
        if self.axis is None:
            seen = attend(query, key, value, self.blocks or Blocks.dense(LENGTH, LENGTH, 64), **options)
        else:
            seen = attend_sequence(query, key, value, self.axis, self.blocks, **options)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Output(nn.Module):
    """The logits of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x))


@dataclass(frozen=True)
class Case:
    """A training: its axes, its ZeRO stage and its attention."""

    sequence: int = 2
    zero: int = 0
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    replica: int = 1
    sparse: bool = True
    dropout: float = 0.0
    recompute: bool = False
    dtype: str = "fp32"
    config: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ranks(self) -> int:
        return self.sequence * self.tensor * self.pipeline * self.data

    @property
    def settings(self) -> dict[str, Any]:
        return {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.7, "zero_optimization": {"stage": self.zero},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}}, "timeout": 60,
                **({self.dtype: {"enabled": True}} if self.dtype != "fp32" else {}), **self.config}


def batch(step: int, data_rank: int, number: int) -> dict[str, Tensor]:
    """Return a microbatch of whole sequences; labels that are not learned lie unevenly along them."""
    generator = torch.Generator().manual_seed(100 * step + 10 * data_rank + number)
    tokens = torch.randint(WORDS, (2, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, :LENGTH // 2 + 7] = -100
    labels[1, -9:] = -100
    return {"input_ids": tokens, "labels": labels}


def layers(axis: SequenceAxis | None, case: Case, tensor_rank: int = 0) -> dict[str, Any]:
    spec = shoal.LayerSpec
    return {"embedding": spec(Embedding), "0": spec(Block, axis, case.sparse, case.dropout, tensor_rank),
            "1": spec(Block, axis, case.sparse, case.dropout, tensor_rank), "output": spec(Output)}


class Whole(nn.Module):
    """The layers as one module."""

    def __init__(self, axis: SequenceAxis | None, case: Case, tensor_rank: int = 0) -> None:
        super().__init__()
        self.recompute = case.recompute
        for name, spec in layers(axis, case, tensor_rank).items():
            torch.manual_seed(len(name) + int(name if name.isdigit() else 7))
            self.add_module(name, spec.build())

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        value: Any = (tokens, positions)
        for name, layer in self.named_children():
            again = self.recompute and name.isdigit()
            value = torch.utils.checkpoint.checkpoint(layer, value, use_reentrant=False) if again else layer(value)
        return value


def train_plain(case: Case, steps: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights of one process with whole sequences."""
    model = Whole(None, case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.0)
    losses: list[float] = []
    for step in range(steps):
        torch.manual_seed(step)
        total = 0.0
        for number in range(2):
            for data_rank in range(case.data):
                whole = batch(step, data_rank, number)
                logits = model(whole["input_ids"], torch.arange(LENGTH).expand(2, -1))
                labels = nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=-100)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
                (loss / (2 * case.data)).backward()
                total += loss.item() / (2 * case.data)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def build(case: Case) -> Any:
    """Return the engine of a case."""
    mesh = shoal.Mesh(pipeline=case.pipeline, replica=case.replica, sequence=case.sequence, tensor=case.tensor)
    axis, tensor_rank = SequenceAxis(mesh.group("sequence")), mesh.rank("tensor")
    if case.pipeline > 1:
        model: Any = shoal.PipelineModule(layers(axis, case, tensor_rank), num_stages=case.pipeline,
                                          loss_fn=lambda logits, labels: cross_entropy(logits, labels, axis))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(Whole(None, case).state_dict()[name.replace("layers.", "")])
    else:
        model = Whole(axis, case, tensor_rank)
    if case.tensor > 1:
        parallelize(model, mesh.group("tensor"), PLAN, stages=mesh.group("pipeline"))
    return shoal.initialize(model=model, config=case.settings, mpu=mesh)[0]


def step_of(engine: Any, case: Case, step: int) -> float:
    """Train one step and return its loss."""
    torch.manual_seed(step)
    parts = [engine.split_sequence(batch(step, engine.mesh.rank("data"), number), multiple=BLOCK) for number in range(2)]
    if case.pipeline > 1:
        return engine.train_batch(iter([((part["input_ids"], part["position_ids"]), part["shift_labels"])
                                        for part in parts])).item()
    total = torch.zeros(())
    for part in parts:
        loss = cross_entropy(engine(part["input_ids"], part["position_ids"]), part["shift_labels"], engine.sequence)
        engine.backward(loss)
        engine.step()
        total += loss.detach() / 2
    return torch.stack(engine.communicator.gather_objects(total)).mean().item()


def train(case: Case, steps: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and the whole weights of the engine's training."""
    engine = build(case)
    losses = [step_of(engine, case, step) for step in range(steps)]
    weights = engine.consolidated_state_dict(torch.float32) or {}
    engine.destroy()
    return losses, weights
