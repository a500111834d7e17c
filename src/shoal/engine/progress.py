"""How far an engine has trained: counters of microbatches and steps, and the state of the accumulation that is under way.

A step ends at a boundary: after `gradient_accumulation_steps` microbatches, or where the training script says so.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

__all__ = ["Progress"]

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(slots=True)
class Progress:
    """The counters of one engine. A slotted object: torch's modules take microseconds to set an attribute."""

    micro_steps: int = 0
    """Microbatches so far; for a pipeline, those of all finished steps."""
    global_steps: int = 0
    """Optimizer steps so far, skipped ones included."""
    global_samples: int = 0
    """Samples of these steps, over all data ranks."""
    skipped_steps: int = 0
    """Steps that an overflow of the gradients has skipped."""
    step_applied: bool = False
    """The last call of `step` changed the weights."""
    boundary_override: bool | None = None
    """Whether the present microbatch ends a step; None: its number decides."""
    sync: bool = True
    """Backward passes reduce gradients; False within `no_sync`."""
    backward_begun: bool = False
    """A backward pass has begun since the last call of `step`."""
    passes: int = 0
    """Backward passes since the last call of `step`."""
    own_passes: int = 0
    """Backward passes since the last optimizer step, without those that another engine's `backward` ran."""
    loss_is_scaled: Callable[[], bool] = lambda: False
    """Whether the backward pass under way is one of a loss that `Engine.scale` returned."""

    def is_boundary(self, accumulation: int) -> bool:
        """Whether the present microbatch is the last of a step of `accumulation` microbatches."""
        if self.boundary_override is not None:
            return self.boundary_override
        return (self.micro_steps + 1) % accumulation == 0

    @property
    def holds_foreign_gradients(self) -> bool:
        """Whether all gradients so far are those of other engines' backward passes."""
        return self.passes > 0 and not self.own_passes

    def begin_backward(self, *, own: bool) -> None:
        """Note the begin of a backward pass, which is not the engine's `own` where another engine's `backward` runs it."""
        self.backward_begun = True
        self.passes += 1
        self.own_passes += own

    def begin_scaled_backward(self, is_running: Callable[[], bool]) -> None:
        """Note that autograd differentiates a scaled loss, for as long as the pass `is_running`."""
        self.loss_is_scaled = is_running

    def begin_step(self) -> None:
        """Note a call of `step`."""
        self.step_applied = self.backward_begun = False
        self.passes = 0

    def count_step(self, samples: int, *, applied: bool) -> None:
        """Count an optimizer step over `samples` samples; one that was not `applied` is skipped."""
        self.step_applied = applied
        self.own_passes = 0
        self.global_steps += 1
        self.global_samples += samples
        self.skipped_steps += not applied

    def count_microbatches(self, count: int = 1) -> None:
        """Count `count` finished microbatches."""
        self.micro_steps += count

    def restart_accumulation(self, accumulation: int) -> None:
        """Discard the microbatches of an unfinished step; where boundaries are set by hand, their numbers mean nothing."""
        self.backward_begun = False
        self.passes = self.own_passes = 0
        if self.boundary_override is None:
            self.micro_steps -= self.micro_steps % accumulation

    def change_accumulation(self, accumulation: int) -> None:
        """Begin a step of another length, and count microbatches as if every step had that length."""
        self.micro_steps = self.global_steps * accumulation

    def override_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the present microbatch ends a step; None: its number decides again."""
        self.boundary_override = is_boundary

    @contextmanager
    def at_boundary(self, is_boundary: bool) -> Generator[None]:
        """Let the microbatch within the context be the last of a step, or not be it."""
        before = self.boundary_override
        self.boundary_override = is_boundary
        try:
            yield
        finally:
            self.boundary_override = before

    @contextmanager
    def syncing(self, sync: bool) -> Generator[None]:
        """Let backward passes within the context communicate only if `sync`, and if those around it may."""
        before = self.sync
        self.sync = before and sync
        try:
            yield
        finally:
            self.sync = before

    @contextmanager
    def one_pass(self, *, boundary: bool, sync: bool) -> Generator[None]:
        """Run one backward pass within the context, at a `boundary` or not, with communication only if `sync`."""
        with self.at_boundary(boundary), self.syncing(sync):
            yield

    def counters(self) -> dict[str, int]:
        """Return the counters that a checkpoint holds."""
        return {"global_steps": self.global_steps, "global_samples": self.global_samples,
                "skipped_steps": self.skipped_steps}

    def load_counters(self, saved: Mapping[str, object], accumulation: int) -> None:
        """Take over the `counters` of a checkpoint, and begin a step of `accumulation` microbatches."""
        self.global_steps, self.global_samples, self.skipped_steps = (cast("int", saved[name]) for name in _COUNTERS)
        self.change_accumulation(accumulation)
