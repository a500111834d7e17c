"""Checks when a backward pass begins: its loss has the right factor; and whether scripts may read `p.grad` after it.

The loss of every microbatch is multiplied by loss scale / gradient accumulation steps before its backward pass.
`engine.backward` and `engine.scale` do so. A plain `loss.backward()` does not: it raises where there is a loss scale, and
warns where only the division by the accumulation is missing.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.log import warn_once
from shoal.optim.compressed import CompressedOptimizer
from shoal.optim.sharded import ShardedOptimizer

__all__ = ["RunningBackward", "grad_refusal"]


@dataclass(slots=True)
class RunningBackward:
    """The backward pass that an engine of this process has called: one loss may lead through several engines."""

    factor: float | None = None
    """The factor of its loss; None while no engine runs one."""
    caller: object = None
    """The engine that runs it, whose factor the loss carries."""

    @contextmanager
    def of(self, caller: object, factor: float) -> Generator[None]:
        """Run a backward pass of `caller`, within the context, of a loss that carries `factor`."""
        outer = self.caller, self.factor
        self.caller, self.factor = caller, factor
        try:
            yield
        finally:
            self.caller, self.factor = outer

    def check_factor(self, engine: object, *, loss_scale: float, accumulation: int) -> None:
        """Raise `UsageError` if the loss of the pass that begins lacks the factor `loss_scale / accumulation` of `engine`.

        A missing division by `accumulation` alone is left to the script, with a warning.
        """
        wanted, factor = loss_scale / accumulation, self.factor
        if self.caller is engine or factor == wanted:  # one loss may lead through several engines
            return
        if factor is not None:
            raise UsageError(f"one loss leads through two engines that scale it differently: the one whose backward was "
                             f"called by {factor:g}, this one by {wanted:g}; give both the same "
                             f"gradient_accumulation_steps and the same static fp16.loss_scale")
        if loss_scale != 1:
            raise UsageError(f"loss.backward() was called on an unscaled loss while the loss scale is "
                             f"{loss_scale:g}; call engine.backward(loss), or engine.scale(loss).backward()")
        if accumulation > 1:
            warn_once("loss.backward() does not divide by gradient_accumulation_steps; divide the loss yourself, or call "
                      "engine.backward(loss)")


def grad_refusal(optimizer: ShardedOptimizer, *, shards_weights: bool, reduced_later: bool) -> str:
    """Return why a script cannot read `p.grad` after a backward pass, and what to call instead; empty where it can.

    `shards_weights`: weights rest sharded, at stage 3. `reduced_later`: the step sums the gradients over more ranks.
    """
    instead = ("set gradient_clipping in the configuration to clip, read engine.get_global_grad_norm(), or register a "
               "hook on the parameter; optimizer.zero_grad() discards")
    if shards_weights:
        return f"is sharded at stage 3, and cannot be read or written: {instead}; stages 0 to 2 have it"
    if optimizer.loss_scale != 1:
        return (f"is multiplied by the loss scale {optimizer.loss_scale:g}, and cannot be read or written: {instead}. A "
                f"GradScaler goes with fp32 weights and autocast, without fp16 in the configuration")
    if reduced_later:
        return f"is not yet reduced over all ranks when backward ends, and cannot be read or written: {instead}"
    if isinstance(optimizer.optimizer, CompressedOptimizer) or optimizer.rules.in_backward:
        return f"is compressed, or stepped in backward, and cannot be read or written: {instead}"
    return ""
