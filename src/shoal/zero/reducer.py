"""From `parameter.grad` to the sum over the ranks: collect gradients as autograd writes them, reduce them in one order.

The order is a contract between ranks. A unit is reduced as soon as it and all units before it are complete. A unit that a
pass did not complete is reduced when the pass ends, with zeros for the missing slots, so that a rank that skips a module
does not hang the others. Transports whose reduction begins with a message from every rank come last, when the pass ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.zero.grad_attribute import take_raw_grad
from shoal.zero.gradient import Gradient, OnReduced
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["IN_FLIGHT", "BackwardPass", "Reducer", "collect"]

IN_FLIGHT = 1
"""Collectives of each kind under way while the next unit's gradient is collected, so that the borrowed memory is constant.
None on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPass:
    """Facts about one backward pass, from the engine, when it begins."""

    boundary: bool
    """Whether it ends an accumulation."""
    sync: bool
    """Whether it communicates."""
    on_reduced: OnReduced | None = None
    """Offered each sum as soon as it is there; returns whether a step has taken it, so that it need not rest."""
    grad_refusal: str = ""
    """Why a script cannot read `p.grad` after it; empty where it can."""


class Reducer:
    """The reductions of one backward pass, and those that passes without communication leave to a step."""

    def __init__(self, gradients: Sequence[Gradient], *, overlap: bool, ranks: int = 1,
                 spanning_stages: Sequence[Gradient] = ()):
        """Gradients `spanning_stages` of a pipeline are reduced by no pass, but by a step when it begins."""
        self._spanning_stages = spanning_stages
        self._order = sorted(gradients, key=lambda gradient: gradient.transport.reduces_after_backward)
        self._in_flight = IN_FLIGHT if ranks > 1 else 0
        self._overlap = overlap
        self._under_way = [deque[Gradient]() for _ in range(max((each.collectives for each in gradients), default=1))]
        """Gradients by how many of the collectives of their reduction have ended, oldest first."""
        self._due: list[Gradient] = []
        self._is_due: set[Gradient] = set()
        self._next = 0
        self._on_reduced: OnReduced | None = None

    def begin(self, backward: BackwardPass) -> None:
        """Start a backward pass."""
        self._settle()
        self._due = [gradient for gradient in self._order
                     if gradient.is_reduced_by(boundary=backward.boundary, sync=backward.sync)]
        self._is_due = set(self._due)
        self._next = 0
        self._on_reduced = backward.on_reduced
        for gradient in self._order:
            gradient.begin(may_step_early=backward.on_reduced is not None and gradient in self._is_due,
                           boundary=backward.boundary)

    @torch.no_grad()
    def _settle(self) -> None:
        """Wait for the reductions that a failed pass left under way, as the other ranks do; the new pass steps none of them.

        `interrupt` does not wait: a rank that failed earlier may never have launched them.
        """
        for gradients in reversed(self._under_way):
            for gradient in gradients:
                gradient.wait_reduced()
            gradients.clear()

    def launch_ready(self) -> None:
        """Launch the complete units, in order."""
        while (self._overlap and self._next < len(self._due) and (due := self._due[self._next]).accumulator.complete
               and not due.transport.reduces_after_backward):
            self._launch(due)
            self._next += 1

    def completed(self, gradient: Gradient) -> None:
        """Offload a complete gradient that this pass does not reduce; launch what can be."""
        if gradient not in self._is_due:
            gradient.offload()
        self.launch_ready()

    def finish(self) -> None:
        """End the backward pass: reduce the rest, and wait for all."""
        for gradient in self._order:
            if gradient not in self._is_due:
                gradient.leave_unreduced()
        for gradient in self._spanning_stages:
            gradient.mark_unreduced()
        if self._due:
            self._reduce_rest()
        self._on_reduced = None

    @torch.no_grad()
    def _reduce_rest(self) -> None:
        for gradient in self._due:
            if not gradient.reduced_in_pass:
                self._launch(gradient)
        for gradient in self._due:
            if gradient.reopened:
                self._launch(gradient)
        self._drain()
        self._due, self._is_due = [], set()

    def interrupt(self) -> None:
        """Note that an exception has ended the present pass: its sums are offered to no step any more."""
        self._on_reduced = None

    def flush(self) -> None:
        """Reduce what earlier passes left unreduced: a step needs it."""
        for gradient in self._order:
            if gradient.unreduced:
                self._launch(gradient)
        self._drain()

    def _launch(self, gradient: Gradient) -> None:
        reducing = self._under_way[0]
        if reducing and len(reducing) >= self._in_flight:
            self._advance(0)  # returns its buffers to the pool before the next borrows
        gradient.reduce()
        reducing.append(gradient)
        if len(reducing) > self._in_flight:
            self._advance(0)
        if not self._overlap:
            self._wait(gradient)

    def _advance(self, ended: int) -> None:
        """End one more collective of the oldest gradient of which so many have `ended`, and start the one that follows."""
        gradient = self._under_way[ended].popleft()
        if ended + 1 == len(self._under_way):
            self._wait(gradient)
            return
        following = self._under_way[ended + 1]
        following.append(gradient)
        gradient.sum_addends()
        if len(following) > self._in_flight:
            self._advance(ended + 1)

    def _wait(self, gradient: Gradient) -> None:
        gradient.wait_reduced()
        gradient.hand_to_step(self._on_reduced)

    def _drain(self) -> None:
        for ended, gradients in enumerate(self._under_way):
            while gradients:
                self._advance(ended)


def collect(unit: TrainableUnit, slot: int, parameter: nn.Parameter, *, nested: bool = False) -> bool:
    """Move the gradient of one slot from `parameter.grad` to the unit; return whether the unit is complete in this pass.

    `nested`: the pass runs within another backward pass (re-entrant recompute), which may give the slot more.
    """
    gradient = _taken(parameter)
    if gradient is None:  # the hook also fires when weight gradients are deferred; grad is None then
        return False
    if nested:
        unit.gradient.expect_recompute()
    if not torch.is_grad_enabled():  # every pass but one with create_graph
        return unit.gradient.accumulator.collect(slot, gradient)
    with torch.no_grad():
        return unit.gradient.accumulator.collect(slot, gradient)


def _taken(parameter: nn.Parameter) -> Tensor | None:
    if type(parameter) is nn.Parameter:
        gradient, parameter.grad = parameter.grad, None
    else:  # released, or of the script's own class
        gradient = take_raw_grad(parameter)
    return gradient
