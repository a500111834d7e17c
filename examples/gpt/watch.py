"""All that happens between two steps and is not training: measure, show, remember, save, and heed a request to stop."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import Tensor

from curve import History
from display import Display
from meter import Meter

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Watch:
    """Follows a run step by step. While entered, Ctrl-C and SIGTERM end it after the step in hand.

    All ranks end after the same step, whichever of them were told to. A checkpoint goes to `checkpoints` every
    `save_every` steps.
    """

    def __init__(self, meter: Meter, display: Display, history: History, checkpoints: Path, save_every: int) -> None:
        self.meter = meter
        self.display = display
        self.history = history
        self.checkpoints = checkpoints
        self.save_every = save_every
        self.losses: list[Tensor] = []
        self.asked = False
        self.stopped = False

    def __enter__(self) -> Watch:
        self.handlers = {number: signal.signal(number, self._remember) for number in SIGNALS}
        self.display.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self.display.__exit__(kind, error, trace)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    @property
    def ended(self) -> bool:
        """Whether all steps are taken, or some rank was told to stop."""
        return self.stopped or self.meter.engine.global_steps >= self.meter.steps

    def note(self, loss: Tensor) -> None:
        """Take note of a microbatch and, when it completed a step, of the step; every rank must call this."""
        self.losses.append(loss.detach())
        if self.meter.engine.micro_steps % self.meter.engine.gradient_accumulation_steps():
            return
        reading = self.meter.read(torch.stack(self.losses).mean(), stop=self.asked)
        self.losses.clear()
        self.history.add(reading.step, reading.bits)
        self.display.show(reading)
        self.stopped = reading.stop
        if reading.step % self.save_every == 0 and not self.ended:
            self.save()

    def save(self) -> None:
        """Write a checkpoint and the curve up to it; every rank must call this."""
        self.meter.engine.save_checkpoint(self.checkpoints)
        if self.meter.engine.global_rank == 0:
            self.history.save()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
