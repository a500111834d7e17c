"""Executes one rank's row of a schedule, instruction by instruction.

    F   receive the stage's input, run the stage, send its output; on the last stage compute the loss
    B   receive the output's gradient, run backward, send the input's gradient
    I   as B, for the input's gradient only; weight-gradient tasks are queued
    W   run the queued weight-gradient tasks; consecutive W of a stage are joined into one product where that is cheaper

A microbatch's activations are held from its F to the end of its B or I, and its weight-gradient tasks from I to W. A rank
that fails aborts its channels, so that its neighbours fail and abort theirs, and publishes the failure on the failure board.
Each rank raises with the grid of the schedule and an arrow at the failed instruction.
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

from shoal.autograd import run_backward
from shoal.errors import CollectiveFailed, GuardError, LossScaleError, PeerFailed, PipelineError, UsageError
from shoal.interrupts import sigint_handler
from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.links import ACTIVATIONS, GRADIENTS, Links
from shoal.pipeline.schedules import PipelineSchedule
from shoal.pipeline.split_backward import WeightGradQueue, deferring, weight_grad_passes
from shoal.pipeline.text_grid import fault
from shoal.pipeline.value_tree import tensors_in
from shoal.transport.failure_board import FailureBoard, interruptible_wait, published_failure

__all__ = ["Batches", "Executor"]

_ABORT_GRACE = 1.0
"""Seconds for an abort to arrive through the channels, which stay usable, before the failure board breaks their waits."""

RunPass = Callable[[int, Callable[[], None], bool, bool], None]
"""(stage, function, last pass of the step, with communication): runs the function as a backward pass of a stage.

It counts as a pass even if it computes nothing, because other data ranks of the stage may compute something in theirs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The microbatches of a step: inputs on the rank of the first stage, labels on the rank of the last.

    Each is moved to the device when it is used, and released here.
    """

    inputs: list[Any] = field(default_factory=list[Any])
    labels: list[Any] = field(default_factory=list[Any])
    to_device: Callable[[Any], Any] = lambda value: value

    def take(self, values: list[Any], microbatch: int) -> Any:
        """Remove one of `values`, and return it on the device."""
        value, values[microbatch] = values[microbatch], None
        return self.to_device(value)


@dataclass(slots=True, kw_only=True)
class _SavedMicrobatch:
    """The tensors of one microbatch that a stage keeps between forward and backward."""

    inputs: list[Tensor]
    """The stage's inputs that require a gradient."""
    outputs: list[Tensor]
    """The stage's outputs that require a gradient, or its loss."""
    weight_grads: WeightGradQueue | None
    """Its weight-gradient tasks; None where backward is not split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankSchedule:
    """A rank's instructions in each step, and facts derived from them."""

    instructions: tuple[Instruction, ...]
    final: frozenset[int]
    """The positions of each stage's last B or W."""
    split: frozenset[int]
    """The stages whose backward is split into I and W."""
    weight_runs: dict[int, tuple[Instruction, ...]]
    """Consecutive W of one stage, by the position of the last of them."""

    @classmethod
    def of(cls, instructions: tuple[Instruction, ...]) -> _RankSchedule:
        final = {instruction.stage: position for position, instruction in enumerate(instructions)
                 if instruction.kind in (Op.BACKWARD, Op.WEIGHT)}
        split = frozenset(instruction.stage for instruction in instructions if instruction.kind is Op.INPUT)
        weight_runs, position = dict[int, tuple[Instruction, ...]](), 0
        for (kind, _), run in groupby(instructions, key=lambda instruction: (instruction.kind, instruction.stage)):
            consecutive = tuple(run)
            position += len(consecutive)
            if kind is Op.WEIGHT:
                weight_runs[position - 1] = consecutive
        return cls(instructions=instructions, final=frozenset(final.values()), split=split,
                   weight_runs=weight_runs)


class Executor:
    """Runs this rank's row of a schedule over its stages, which are given by number; `last` is the pipeline's last stage."""

    def __init__(self, stages: Mapping[int, nn.Module], last: int, links: Links, loss_fn: Callable[..., Any] | None,
                 run_pass: RunPass, *, may_be_freed: Callable[[Tensor], bool], label: str, failure_board: FailureBoard):
        """`may_be_freed` tells whether a tensor's memory may be released between forward and backward.

        `label` names this rank in errors.
        """
        self._stages = stages
        self._last = last
        self._links = links
        self._loss_fn = loss_fn
        self._run_pass = run_pass
        self._may_be_freed = may_be_freed
        self._label = label
        self._board = failure_board
        self._failure: str | None = None
        self._saved: dict[tuple[int, int], _SavedMicrobatch] = {}
        self._position = 0
        self._row = _RankSchedule.of(())

    def run(self, schedule: PipelineSchedule, rank: int, batches: Batches, factor: float) -> list[Tensor]:
        """Run `rank`'s row for training, with each loss times `factor`; return the last stage's losses, by microbatch.

        Raises `PipelineError` when an instruction fails here or on another rank; no optimizer step may follow.
        """
        losses: list[Tensor] = []
        if self._row.instructions is not schedule.rows[rank]:  # the same object from step to step
            self._row = _RankSchedule.of(schedule.rows[rank])
        row = self._row
        with self._reporting(schedule, rank):
            for position, instruction in enumerate(row.instructions):
                self._position = position
                match instruction.kind:
                    case Op.FORWARD:
                        losses += self._forward(instruction, batches, split=instruction.stage in row.split)
                    case Op.BACKWARD | Op.INPUT:
                        self._backward(instruction, factor, last=position in row.final)
                    case Op.WEIGHT if position in row.weight_runs:
                        self._weight_grads(row.weight_runs[position], last=position in row.final)
                    case Op.WEIGHT:
                        pass  # the last of its run computes all
        return losses

    def evaluate(self, schedule: PipelineSchedule, rank: int, batches: Batches, *, losses: bool,
                 outputs: bool) -> list[tuple[Any, Any]]:
        """Run `rank`'s row of forwards; return (output, loss) of the last stage by microbatch, None where not requested."""
        found: list[tuple[Any, Any]] = []
        with torch.no_grad(), self._reporting(schedule, rank):
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
        """Raise `PipelineError` if an earlier step failed."""
        if self._failure is not None:
            raise PipelineError(f"{self._label}: an earlier step failed, and the stages are no longer at the same point "
                                f"of training: load a checkpoint into a new engine. The failure was: {self._failure}")

    def close(self) -> None:
        """Close the channels."""
        self._links.close()

    def _forward(self, instruction: Instruction, batches: Batches, *, split: bool) -> list[Tensor]:
        """Run a stage forward; return its loss if it is the last."""
        value = self._input(instruction, batches)
        weight_grads = WeightGradQueue(self._may_be_freed) if split else None
        with nullcontext() if weight_grads is None else deferring(weight_grads):
            output = self._stages[instruction.stage](value)
            if instruction.stage == self._last:
                output = self._loss(output, instruction, batches)
        if instruction.stage < self._last:
            self._links.send(ACTIVATIONS, instruction.stage + 1, output)
        stage = instruction.stage
        self._saved[stage, instruction.microbatch] = _SavedMicrobatch(
            inputs=_requiring_grad(value, "the input", stage) if stage > 0 else [],
            outputs=_requiring_grad(output, "the output", stage), weight_grads=weight_grads)
        return [output.detach()] if instruction.stage == self._last else []

    def _backward(self, instruction: Instruction, factor: float, *, last: bool) -> None:
        stage, key = instruction.stage, (instruction.stage, instruction.microbatch)
        whole = instruction.kind is Op.BACKWARD
        saved = self._saved.pop(key) if whole else self._saved[key]
        run_pass = run_backward if saved.weight_grads is None else saved.weight_grads.backward_input
        if stage == self._last:
            gradients: list[Tensor | None] = [torch.full_like(output, factor) for output in saved.outputs]
        else:
            gradients = cast("list[Tensor | None]", self._links.receive(GRADIENTS, stage))
        outputs = [output for output, gradient in zip(saved.outputs, gradients, strict=True) if gradient is not None]
        output_grads = [gradient for gradient in gradients if gradient is not None]
        inputs, saved.outputs, saved.inputs = saved.inputs, [], []
        input_grads = _InputGradSender(inputs, partial(self._links.send, GRADIENTS, stage - 1)) if stage > 0 else None
        if input_grads is not None and last and whole:
            input_grads.send_early()
        run = partial(run_pass, outputs, output_grads) if outputs else _nothing
        self._run_pass(stage, run, last and whole, whole)
        if input_grads is not None:
            input_grads.finish()

    def _weight_grads(self, instructions: Sequence[Instruction], *, last: bool) -> None:
        """Run the weight-gradient tasks of the microbatches of `instructions`, all of one stage.

        Ranks may join products of different sizes, and so need different numbers of passes: only the last one communicates.
        """
        queues = [self._saved.pop((instruction.stage, instruction.microbatch)).weight_grads for instruction in instructions]
        passes = weight_grad_passes(queue for queue in queues if queue is not None)
        for number, run in enumerate(passes, 1):
            final = number == len(passes)
            self._run_pass(instructions[0].stage, run, last and final, final)

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
    def _reporting(self, schedule: PipelineSchedule, rank: int) -> Generator[None]:
        """Run a row; publish a failure to the other ranks, and raise it with the grid of the schedule."""
        self.refuse_failed()
        self._saved.clear()
        self._position = 0
        self._links.begin(schedule.rows[rank])
        try:
            with sigint_handler(), interruptible_wait(self._links.end_waits, grace=_ABORT_GRACE):
                yield
                self._links.flush()
        except BaseException as error:
            text = self._message(f"{schedule.rows[rank][self._position]} failed", error)
            self._fail(text)
            if not isinstance(error, Exception):  # KeyboardInterrupt or SystemExit
                raise
            raise PipelineError(f"{text}\n{fault(schedule, rank, self._position)}") from error

    @contextmanager
    def joint_operation(self, what: str) -> Generator[None]:
        """Run `what`, a joint operation of all ranks after a row; publish a failure like that of a row."""
        try:
            yield
        except (UsageError, LossScaleError, GuardError):  # raised by all ranks
            raise
        except Exception as error:
            text = self._message(f"{what} failed", error)
            self._fail(text)
            raise PipelineError(text) from error

    def _message(self, what: str, error: BaseException) -> str:
        """Return the message for an error; the failed rank's own message if another rank failed."""
        if isinstance(error, PipelineError | PeerFailed):
            return str(error)
        if isinstance(error, CollectiveFailed) and (published := published_failure()) is not None:
            return published
        return f"{self._label}: {what}: {type(error).__name__}: {error}"

    def _fail(self, message: str) -> None:
        """Publish a failure to the other ranks, and refuse further steps."""
        self._failure = message
        self._saved.clear()
        self._board.publish(message)
        self._links.abort(message)


class _InputGradSender:
    """Sends the gradients of a stage's inputs to the stage before.

    They are sent at the end of the backward pass. The last pass of a step also reduces weight gradients, so it sends them
    early, when the last of them is accumulated: the stage before does not wait for the reduction.
    """

    def __init__(self, inputs: list[Tensor], send: Callable[[list[Tensor | None]], None]):
        self._inputs = inputs
        self._send = send
        self._sent = False
        self._missing = len(inputs)

    def send_early(self) -> None:
        """Send them as soon as all are accumulated."""
        for tensor in self._inputs:
            tensor.register_post_accumulate_grad_hook(self._on_accumulated)

    def finish(self) -> None:
        """Send them unless that is done; None for an input that backward did not reach."""
        if not self._sent:
            self._sent = True
            inputs, self._inputs = self._inputs, []  # their hooks hold this object
            self._send([tensor.grad for tensor in inputs])

    def _on_accumulated(self, tensor: Tensor) -> None:
        self._missing -= 1
        if self._missing == 0:
            self.finish()


def _nothing() -> None:
    """Run a pass without any computation."""


def _requiring_grad(value: object, what: str, stage: int) -> list[Tensor]:
    """Return the tensors within `value` that require a gradient."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    return [tensor for tensor in tensors_in(value, f"{what} of stage {stage}") if tensor.requires_grad]
