"""One rank of a pipeline: its instructions in their order, nothing else.

    F   take the stage's input, run the stage, hand its output on; on the last stage take the loss
    B   take the output's gradient, run backward, hand the input's gradient on
    I   the same for the input's gradient only; what weights are owed is kept
    W   give the weights what they are owed; several in a row are one product where that is less

A microbatch's activations are held from its F to the end of its B or I, and what its weights are owed from I to W. A failure
is told to the neighbours, who tell theirs, and raises with the grid of the schedule, the fault marked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.errors import CollectiveFailed, LossScaleError, PeerFailed, PipelineError, UsageError
from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.links import ACTIVATIONS, GRADIENTS, Links
from shoal.pipeline.schedules import PipelineSchedule
from shoal.pipeline.split_backward import WeightGradQueue, backward, deferring, rounds
from shoal.pipeline.stage_io import tensors_in
from shoal.pipeline.text_grid import fault
from shoal.transport.failure_board import FailureBoard, interruptible_wait, published_failure

__all__ = ["Batches", "Executor"]

_GRACE = 1.0
"""Seconds for an abort to come through the channels, which leaves them whole, before word of it ends them."""

Pass = Callable[[int, Callable[[], None], bool, bool], None]
"""(stage, what to call, last of the step, with communication): calls it as a backward pass of a stage, which counts as one
even if nothing ran in it: other ranks of the stage may have had something to run.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """What the microbatches of a step are: inputs on the first stage's rank, labels on the last one's.

    Each is brought to the device when it is used, and forgotten then.
    """

    inputs: list[Any] = field(default_factory=list[Any])
    labels: list[Any] = field(default_factory=list[Any])
    here: Callable[[Any], Any] = lambda value: value

    def take(self, values: list[Any], microbatch: int) -> Any:
        """Return one of `values`, on the device."""
        value, values[microbatch] = values[microbatch], None
        return self.here(value)


@dataclass(slots=True, kw_only=True)
class _SavedMicrobatch:
    """What a microbatch leaves at a stage between its forward and its backward."""

    inputs: list[Tensor]
    """Those of the stage's inputs that want a gradient."""
    outputs: list[Tensor]
    """Those of its outputs that have one, or its loss."""
    deferred: WeightGradQueue | None
    """What its weights are owed; None where backward is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankSchedule:
    """What a rank does in each step, and what follows from it."""

    instructions: tuple[Instruction, ...]
    final: frozenset[int]
    """The positions at which a stage has its last backward."""
    split: frozenset[int]
    """The stages whose backward is in two halves."""
    payments: dict[int, tuple[Instruction, ...]]
    """The W of one stage that come one after the other, by the position of their last."""

    @classmethod
    def of(cls, instructions: tuple[Instruction, ...]) -> _RankSchedule:
        final = {instruction.stage: position for position, instruction in enumerate(instructions)
                 if instruction.kind in (Op.BACKWARD, Op.WEIGHT)}
        split = frozenset(instruction.stage for instruction in instructions if instruction.kind is Op.INPUT)
        payments, position = dict[int, tuple[Instruction, ...]](), 0
        for (kind, _), run in groupby(instructions, key=lambda instruction: (instruction.kind, instruction.stage)):
            together = tuple(run)
            position += len(together)
            if kind is Op.WEIGHT:
                payments[position - 1] = together
        return cls(instructions=instructions, final=frozenset(final.values()), split=split, payments=payments)


class Executor:
    """Runs this rank's row of a schedule over its stages, by their numbers."""

    def __init__(self, stages: Mapping[int, nn.Module], last: int, links: Links, loss_fn: Callable[..., Any] | None,
                 as_pass: Pass, *, leaves: Callable[[Tensor], bool], where: str, board: FailureBoard):
        """`leaves` says of a tensor whether its memory may be given up between forward and backward."""
        self._stages = stages
        self._last = last
        self._links = links
        self._loss_fn = loss_fn
        self._pass = as_pass
        self._leaves = leaves
        self._where = where
        self._board = board
        self._failure: str | None = None
        self._held: dict[tuple[int, int], _SavedMicrobatch] = {}
        self._position = 0
        self._row = _RankSchedule.of(())

    def run(self, schedule: PipelineSchedule, rank: int, batches: Batches, factor: float) -> list[Tensor]:
        """Run `rank`'s row for training, each loss times `factor`; return the losses, of the last stage, by microbatch.

        Raises `PipelineError` when an instruction fails here or on another rank; no step may follow.
        """
        losses: list[Tensor] = []
        if self._row.instructions is not schedule.rows[rank]:  # the same from step to step
            self._row = _RankSchedule.of(schedule.rows[rank])
        row = self._row
        with self._telling(schedule, rank):
            for position, instruction in enumerate(row.instructions):
                self._position = position
                match instruction.kind:
                    case Op.FORWARD:
                        losses += self._forward(instruction, batches, split=instruction.stage in row.split)
                    case Op.BACKWARD | Op.INPUT:
                        self._backward(instruction, factor, last=position in row.final)
                    case Op.WEIGHT if position in row.payments:
                        self._weights(row.payments[position], last=position in row.final)
                    case Op.WEIGHT:
                        pass  # the last of its run pays for all
        return losses

    def evaluate(self, schedule: PipelineSchedule, rank: int, batches: Batches, *, losses: bool,
                 outputs: bool) -> list[tuple[Any, Any]]:
        """Run `rank`'s row of forwards; return (output, loss) of the last stage, each None unless asked for."""
        found: list[tuple[Any, Any]] = []
        with torch.no_grad(), self._telling(schedule, rank):
            for position, instruction in enumerate(schedule.rows[rank]):
                self._position = position
                output = self._stages[instruction.stage](self._input(instruction, batches))
                if instruction.stage < self._last:
                    self._links.send(ACTIVATIONS, instruction.stage + 1, output)
                else:
                    loss = self._loss(output, instruction, batches) if losses else None
                    found.append((output if outputs else None, loss))
        return found

    def refuse_failed(self) -> None:
        """Raise `PipelineError` if a step failed."""
        if self._failure is not None:
            raise PipelineError(f"{self._where}: an earlier step failed, and the stages are no longer at one point of "
                                f"training: load a checkpoint into a new engine. What went wrong: {self._failure}")

    def close(self) -> None:
        """End the channels."""
        self._links.close()

    def _forward(self, instruction: Instruction, batches: Batches, *, split: bool) -> list[Tensor]:
        """Run a stage; return its loss, if it is the last."""
        value = self._input(instruction, batches)
        deferred = WeightGradQueue(self._leaves) if split else None
        with nullcontext() if deferred is None else deferring(deferred):
            output = self._stages[instruction.stage](value)
            if instruction.stage == self._last:
                output = self._loss(output, instruction, batches)
        if instruction.stage < self._last:
            self._links.send(ACTIVATIONS, instruction.stage + 1, output)
        stage = instruction.stage
        self._held[stage, instruction.microbatch] = _SavedMicrobatch(
            inputs=_wanting(value, "the input", stage) if stage > 0 else [],
            outputs=_wanting(output, "the output", stage), deferred=deferred)
        return [output.detach()] if instruction.stage == self._last else []

    def _backward(self, instruction: Instruction, factor: float, *, last: bool) -> None:
        stage, key = instruction.stage, (instruction.stage, instruction.microbatch)
        whole = instruction.kind is Op.BACKWARD
        held = self._held.pop(key) if whole else self._held[key]
        half = backward if held.deferred is None else held.deferred.backward
        if stage == self._last:
            gradients: list[Tensor | None] = [torch.full_like(output, factor) for output in held.outputs]
        else:
            gradients = cast("list[Tensor | None]", self._links.receive(GRADIENTS, stage))
        outputs = [output for output, gradient in zip(held.outputs, gradients, strict=True) if gradient is not None]
        given = [gradient for gradient in gradients if gradient is not None]
        inputs, held.outputs, held.inputs = held.inputs, [], []
        onward = _Onward(inputs, partial(self._links.send, GRADIENTS, stage - 1)) if stage > 0 else None
        if onward is not None and last and whole:
            onward.early()
        self._pass(stage, partial(half, outputs, given) if outputs else _nothing, last and whole, whole)
        if onward is not None:
            onward.finish()

    def _weights(self, instructions: Sequence[Instruction], *, last: bool) -> None:
        """Give the weights of a stage what they are owed by the microbatches of `instructions`.

        Ranks may join products of different sizes, and so need different numbers of passes: the last one alone communicates.
        """
        held = [self._held.pop((instruction.stage, instruction.microbatch)).deferred for instruction in instructions]
        passes = rounds(deferred for deferred in held if deferred is not None)
        for number, run in enumerate(passes, 1):
            final = number == len(passes)
            self._pass(instructions[0].stage, run, last and final, final)

    def _input(self, instruction: Instruction, batches: Batches) -> Any:
        if instruction.stage == 0:
            return batches.take(batches.inputs, instruction.microbatch)
        return self._links.receive(ACTIVATIONS, instruction.stage)

    def _loss(self, output: Any, instruction: Instruction, batches: Batches) -> Any:
        labels = batches.take(batches.labels, instruction.microbatch)
        try:
            loss = output if self._loss_fn is None else self._loss_fn(output, labels)
        except Exception as error:
            sizes = [{tensor.shape[0] for tensor in tensors_in(value, "the loss") if tensor.dim()}
                     for value in (output, labels)]
            if all(len(each) == 1 for each in sizes) and sizes[0] != sizes[1]:
                raise UsageError(f"loss_fn: {error} (the output has {sizes[0].pop()} samples, and the labels "
                                 f"{sizes[1].pop()}; the ranks of the first and the last stage draw the same samples, in "
                                 f"the same order)") from error
            raise
        if torch.is_grad_enabled() and not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UsageError(f"the last stage gave {got} as loss; {'loss_fn' if self._loss_fn else 'the last layer'} must "
                             f"return a scalar that depends on weights of the stage")
        return loss

    @contextmanager
    def _telling(self, schedule: PipelineSchedule, rank: int) -> Generator[None]:
        """Run a row; what goes wrong is told to everybody."""
        self.refuse_failed()
        self._held.clear()
        self._position = 0
        self._links.begin(schedule.rows[rank])
        try:
            with interruptible_wait(self._links.end_waits, grace=_GRACE):
                yield
                self._links.flush()
        except BaseException as error:
            text = self._words(f"{schedule.rows[rank][self._position]} failed", error)
            self._fail(text)
            if not isinstance(error, Exception):  # somebody wants to end the program
                raise
            raise PipelineError(f"{text}\n{fault(schedule, rank, self._position)}") from error

    @contextmanager
    def together(self, what: str) -> Generator[None]:
        """Do something with the other ranks after a row; what goes wrong is told to them, and is the end as within a row."""
        try:
            yield
        except (UsageError, LossScaleError):  # of all ranks alike
            raise
        except Exception as error:
            text = self._words(f"{what} failed", error)
            self._fail(text)
            raise PipelineError(text) from error

    def _words(self, what: str, error: BaseException) -> str:
        """Return what to say of an error: what another rank said, if it came from there."""
        if isinstance(error, PipelineError | PeerFailed):
            return str(error)
        if isinstance(error, CollectiveFailed) and (word := published_failure()) is not None:
            return word
        return f"{self._where}: {what}: {type(error).__name__}: {error}"

    def _fail(self, message: str) -> None:
        self._failure = message
        self._held.clear()
        self._board.publish(message)
        self._links.abort(message)


class _Onward:
    """The gradients of a stage's inputs, which the stage before waits for.

    They are sent when the pass is over. One that reduces gradients of weights before it ends sends them early, as soon as
    the last of them is there: who waits for them need not wait for a reduction too.
    """

    def __init__(self, inputs: list[Tensor], send: Callable[[list[Tensor | None]], None]):
        self._inputs = inputs
        self._send = send
        self._sent = False
        self._missing = len(inputs)

    def early(self) -> None:
        for tensor in self._inputs:
            tensor.register_post_accumulate_grad_hook(self._came)

    def finish(self) -> None:
        """Send them, unless that is done; an input that nothing led to has none."""
        if not self._sent:
            self._sent = True
            inputs, self._inputs = self._inputs, []  # whose hooks lead here
            self._send([tensor.grad for tensor in inputs])

    def _came(self, tensor: Tensor) -> None:
        self._missing -= 1
        if self._missing == 0:
            self.finish()


def _nothing() -> None:
    """Be a pass in which nothing runs."""


def _wanting(value: object, what: str, stage: int) -> list[Tensor]:
    """Return the tensors within `value` that take part in backward."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    return [tensor for tensor in tensors_in(value, f"{what} of stage {stage}") if tensor.requires_grad]
