"""Published pipeline schedules: the instructions of each tick of one stage, as data.

Time is cut into ticks. In the schedule of training (1F1B) stage s of S computes, for microbatch m of M,

    forward at tick s + 2m,    backward at tick 2S - 1 - s + 2m,    2 (M + S - 1) ticks in all,

and sends what a tick has computed at the next one. Shoal's engine runs the schedules of `shoal.pipeline`; these are for
scripts that read or print a schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

__all__ = ["BackwardPass", "BufferOpInstruction", "DataParallelSchedule", "ForwardPass", "InferenceSchedule",
           "LoadMicroBatch", "OptimizerStep", "PipeInstruction", "PipeSchedule", "RecvActivation", "RecvGrad",
           "ReduceGrads", "ReduceTiedGrads", "SendActivation", "SendGrad", "TrainSchedule"]


class PipeInstruction:
    """One thing that a stage does; its keywords are attributes."""

    def __init__(self, **kwargs: Any):
        self.name = type(self).__name__
        self.kwargs = kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Apply the gradients."""


class ReduceGrads(PipeInstruction):
    """Reduce the gradients over the data ranks."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce the gradients of tied weights over their stages."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on one buffer of activations."""

    def __init__(self, buffer_id: int, **kwargs: Any):
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Load a microbatch into the buffer."""


class ForwardPass(BufferOpInstruction):
    """Compute the forward of the buffer."""


class BackwardPass(BufferOpInstruction):
    """Compute the backward of the buffer."""


class SendActivation(BufferOpInstruction):
    """Send the output of the buffer to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the input of the buffer from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the buffer's input to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the buffer's output from the next stage."""


class PipeSchedule(ABC):
    """The instructions of one stage, tick by tick: iterate over it, or over `steps()`."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int):
        super().__init__()
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1
        self.it: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each tick."""

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers that the stage needs."""
        return self.micro_batches

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    @property
    def stage(self) -> int:
        """The stage of this schedule."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The stages of the pipeline."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The microbatches of a batch."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether this is the first stage."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last stage."""
        return self.stage_id == self.stages - 1

    def _buffer_idx(self, micro_batch_id: int) -> int:
        assert self._valid_micro_batch(micro_batch_id), micro_batch_id
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        self.it = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self.it is None:
            self.it = self.steps()
        return next(self.it)


class InferenceSchedule(PipeSchedule):
    """Forward passes alone, in two buffers that take turns."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for tick in range(self.micro_batches + self.stages - 1):
            microbatch, commands = tick - self.stage_id, list[PipeInstruction]()
            current, before = ((tick + self.stage_id) % 2, (tick + self.stage_id + 1) % 2)
            valid = self._valid_micro_batch(microbatch)
            if valid and (self.is_first_stage or self.is_last_stage):
                commands.append(LoadMicroBatch(current))
            sends = [SendActivation(before)] if (self._valid_stage(self.next_stage)
                                                 and self._valid_micro_batch(microbatch - 1)) else []
            receives = [RecvActivation(current)] if valid and self._valid_stage(self.prev_stage) else []
            commands += [*sends, *receives] if self.stage_id % 2 == 0 else [*receives, *sends]
            if valid:
                commands.append(ForwardPass(current))
            yield commands

    def num_pipe_buffers(self) -> int:
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B: as soon as a stage can, it follows each forward pass by a backward pass."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        ticks = 2 * (self.micro_batches + self.stages - 1)
        before = -1
        for tick in range(ticks):
            microbatch, forward = self._step_to_micro_batch(tick)
            commands = [*self._exchange(microbatch, before, forward=forward)]
            if self._valid_micro_batch(microbatch):
                buffer = self._buffer_idx(microbatch)
                if forward and (self.is_first_stage or self.is_last_stage):
                    commands.append(LoadMicroBatch(buffer))
                commands.append(ForwardPass(buffer) if forward else BackwardPass(buffer))
            if tick == ticks - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = microbatch
            yield commands

    def _exchange(self, microbatch: int, before: int, *, forward: bool) -> Iterator[PipeInstruction]:
        """Yield what this tick receives, and what it sends of the tick before, which went the other way."""
        now, sent = self._valid_micro_batch(microbatch), self._valid_micro_batch(before)
        if forward and self._valid_stage(self.prev_stage):
            if sent:
                yield SendGrad(self._buffer_idx(before))
            if now:
                yield RecvActivation(self._buffer_idx(microbatch))
        if not forward and self._valid_stage(self.next_stage):
            if now:
                yield RecvGrad(self._buffer_idx(microbatch))
            if sent:
                yield SendActivation(self._buffer_idx(before))

    def num_pipe_buffers(self) -> int:
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """Return the microbatch of a tick, and whether the tick is one of a forward pass."""
        forward = (step_id - self.stage_id) % 2 == 0
        start = self.stage_id if forward else 2 * self.stages - 1 - self.stage_id
        return (step_id - start) // 2, forward


class DataParallelSchedule(PipeSchedule):
    """One stage: forward and backward of each microbatch, and a step at the end."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for microbatch in range(self.micro_batches):
            last = microbatch == self.micro_batches - 1
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *([ReduceGrads(), OptimizerStep()] if last else [])]

    def num_pipe_buffers(self) -> int:
        return 1
