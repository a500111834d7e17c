"""The calls of a script to its optimizer, which the engine answers: `optimizer.step()` is a step of the engine.

A loop of plain PyTorch calls the optimizer that `initialize` returned. The engine counts microbatches and decides whether a
step is due, so the optimizer forwards these calls to its `StepOwner`: an `OptimizerCalls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from shoal.engine.progress import Progress
from shoal.engine.state_dicts import StateDicts
from shoal.errors import UsageError
from shoal.optim.sharded import ShardedOptimizer

__all__ = ["OptimizerCalls"]


class Stepping(Protocol):
    """The part of an engine that `OptimizerCalls` uses."""

    progress: Progress
    optimizer: ShardedOptimizer | None
    state_dicts: StateDicts

    def backward(self, loss: Tensor, retain_graph: bool = False) -> Tensor: ...
    def step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def begin_call(self, call: str) -> None: ...
    def gradient_accumulation_steps(self) -> int: ...
    def is_gradient_accumulation_boundary(self) -> bool: ...


class OptimizerCalls:
    """The calls to the optimizer of one engine."""

    def __init__(self, engine: Stepping):
        self._engine = engine

    def backward_by_optimizer(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Run the backward pass that a call of `optimizer.backward(loss)` asks for: the engine's."""
        self._engine.backward(loss, retain_graph=retain_graph)

    def step_by_optimizer(self) -> None:
        """Take the step that a call of `optimizer.step()` asks for.

        Raises `UsageError` where the script accumulates by itself beside a configuration that counts microbatches too.
        """
        engine = self._engine
        passes, accumulation = engine.progress.passes, engine.gradient_accumulation_steps()
        if 1 < accumulation <= passes and not engine.is_gradient_accumulation_boundary():
            raise UsageError(f"optimizer.step: called after {passes} backward passes, and with gradient_accumulation_steps "
                             f"{accumulation} each call of step() counts one microbatch: call step() after every backward, "
                             f"or set gradient_accumulation_steps to 1 and accumulate by yourself")
        engine.step()

    def zero_grad_by_optimizer(self) -> None:
        """Discard the gradients that a call of `optimizer.zero_grad()` means."""
        engine = self._engine
        engine.begin_call("optimizer.zero_grad")
        if engine.optimizer is not None and engine.progress.boundary_override is not None:
            engine.optimizer.discard_gradients()
        else:
            engine.zero_grad()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the portable state dict of the optimizer."""
        assert self._engine.optimizer is not None
        return self._engine.state_dicts.of_optimizer(self._engine.optimizer)

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a portable state dict into the optimizer."""
        assert self._engine.optimizer is not None
        self._engine.state_dicts.load_optimizer(self._engine.optimizer, state_dict)
