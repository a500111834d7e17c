"""The model of a program, and what trains it: the engine, or plain PyTorch under the engine's calls."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import shoal

WIDTH, INPUTS = 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between modules and parameters of the root."""

    def __init__(self, blocks: int, *, tied: bool, recompute: bool | None, frozen: bool):
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.recompute = recompute
        if tied:
            self.blocks[-1].up.weight = self.blocks[0].up.weight
        if frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x) * self.scale


class Trained:
    """A model in training, with what a program keeps of it. `ByEngine` and `ByTorch` train it."""

    sharded = False
    """Whether reads outside of passes raise."""
    persistent = 0
    """Parameters of so many elements can be read all the same."""

    def __init__(self, module: Any, accumulation: int):
        self.module = module
        self.accumulation = accumulation
        self.losses: list[Tensor] = []
        """Of forwards whose backward is still to come."""
        self.kept: list[Tensor] = []
        """Tensors that share the memory of weights."""
        self.handles: list[RemovableHandle] = []
        self.log: list[Tensor] = []
        """What hooks have seen."""
        self.microbatches = 0
        """Calls of `step` since the last load."""
        self.has_saved = False

    @property
    def at_boundary(self) -> bool:
        """Whether no accumulation is under way."""
        return self.microbatches % self.accumulation == 0

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    @abstractmethod
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None: ...

    @abstractmethod
    def step(self) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    @abstractmethod
    def edit(self, parameters: list[nn.Parameter], write: Callable[[Tensor], object]) -> None:
        """Write into weights, of which the engine takes over what rank 0 wrote."""

    @abstractmethod
    def save(self) -> None: ...

    @abstractmethod
    def load(self) -> None: ...


class ByEngine(Trained):
    """Training by an engine."""

    def __init__(self, engine: shoal.Engine, folder: str, *, persistent: int):
        super().__init__(engine.module, engine.gradient_accumulation_steps())
        self.engine = engine
        self.folder = folder
        self.sharded = engine.zero_optimization_stage() == 3
        self.persistent = persistent

    def forward(self, x: Tensor) -> Tensor:
        return self.engine(x)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.engine.backward(loss, retain_graph=retain_graph)

    def step(self) -> None:
        self.engine.step()
        self.microbatches += 1

    def no_sync(self) -> AbstractContextManager[None]:
        return self.engine.no_sync()

    def edit(self, parameters: list[nn.Parameter], write: Callable[[Tensor], object]) -> None:
        with shoal.gathered(parameters, modifier_rank=0), torch.no_grad():
            for parameter in parameters if dist.get_rank() == 0 else ():
                write(parameter)

    def save(self) -> None:
        self.engine.save_checkpoint(self.folder, tag="saved")
        self.engine.wait_for_checkpoint()
        self.has_saved = True

    def load(self) -> None:
        self.engine.load_checkpoint(self.folder, tag="saved")
        self.microbatches = 0


class ByTorch(Trained):
    """Training in plain PyTorch: gradients are averaged over the ranks when a step is taken."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, accumulation: int):
        super().__init__(module, accumulation)
        self.optimizer = optimizer
        self.saved: Any = None

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        (loss / self.accumulation).backward(retain_graph=retain_graph)

    def step(self) -> None:
        self.microbatches += 1
        if not self.at_boundary:
            return
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def edit(self, parameters: list[nn.Parameter], write: Callable[[Tensor], object]) -> None:
        with torch.no_grad():
            for parameter in parameters:
                write(parameter)

    def save(self) -> None:
        self.saved = copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict()))
        self.has_saved = True

    def load(self) -> None:
        weights, state = copy.deepcopy(self.saved)
        self.module.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        self.optimizer.zero_grad()
        self.microbatches = 0
