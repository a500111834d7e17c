"""The engine: the user's loop, `engine(batch)`, `engine.backward(loss)`, `engine.step()`, around an unchanged model.

A step is taken at the end of accumulation, the boundary; between boundaries `step()` only counts the microbatch.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal.autograd import backward_liveness
from shoal.engine.base import BaseEngine
from shoal.engine.join import Join, JoinedCall
from shoal.errors import CollectiveFailed, RanksDisagree, UsageError
from shoal.interrupts import sigint_handler, unbroken
from shoal.transport.collectives import Communicator
from shoal.transport.reduction import wide_dtype
from shoal.tree import fingerprint_of
from shoal.zero.compiled import opaque, opaque_frame
from shoal.zero.reducer import BackwardPass

__all__ = ["Engine"]


class Engine(BaseEngine):
    """One model in training. Build it with `shoal.initialize`."""

    _batches_compared: bool = False
    _joined: Join | None = None

    @opaque_frame  # torch.compile(engine) compiles the model's forward, not this one
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        At the first call (with `debug` at each) raises `RanksDisagree` where the tensor ranks got different batches, or the
        sequence ranks, in training, parts of different shapes.
        """
        args, kwargs = self._begin_forward(args, kwargs)
        try:
            with sigint_handler(), self._during_forward():
                return self.module(*args, **kwargs)
        finally:
            self._end_forward()

    @opaque
    def _begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model's forward, checked and cast."""
        self.begin_call("forward" if torch.is_grad_enabled() else "forward without gradients")
        if self.settings.debug or not self._batches_compared:
            if self.parameter_groups.tensor is not None:
                _compare_batches(self.parameter_groups.tensor, (args, kwargs))
            in_parts = self.parameter_groups.sequence if self.module.training else None  # an evaluation may be of the whole
            if in_parts is not None:
                _compare_parts(in_parts, (args, kwargs))
            self._batches_compared = self.parameter_groups.sequence is None or in_parts is not None
        if self._joined is not None:
            self._joined.announce(JoinedCall.FORWARD if torch.is_grad_enabled() else JoinedCall.EVALUATION, (args, kwargs))
        return self.cast_inputs((args, kwargs))

    @opaque
    def _during_forward(self) -> AbstractContextManager[None]:
        return self.during("forward")

    @opaque
    def _end_forward(self) -> None:
        if not (torch.is_grad_enabled() and self.module.training):
            self.checkpointer.note_evaluation(training=self.module.training)
        for each in () if self.sharded is None else self.sharded.passes:
            each.end_forward()

    def begin_pass(self, after_failure: bool) -> BackwardPass:
        """Tell the ranks within `join` that a backward pass begins; then as in the base class."""
        if self._joined is not None:
            self._joined.announce(JoinedCall.BACKWARD)
        return super().begin_pass(after_failure)

    @opaque
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *,
                 allreduce_gradients: bool = True, release_loss: bool = False) -> Tensor:
        """Accumulate the gradients of `loss`, a scalar that this engine's forward gave.

        The gradients of a boundary are the mean over microbatches and data ranks: `loss` is divided by
        `gradient_accumulation_steps` unless `scale_wrt_gas` is false. Returns the loss so divided, without loss scale.
        With `allreduce_gradients` false nothing is reduced before `step`. `release_loss` is accepted for published scripts
        and ignored.
        """
        self.begin_call("backward")
        if self.optimizer is None:
            raise UsageError("backward: the engine has no optimizer; give initialize one, or name one in the configuration")
        if not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  scripts pass numbers
            raise UsageError(f"backward: got a {type(loss).__name__}; pass the scalar loss tensor")
        if loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(f"backward: got a tensor of shape {tuple(loss.shape)} "
                             f"{'with' if loss.requires_grad else 'without'} a graph; pass the scalar loss that the "
                             f"engine's forward led to, with gradients enabled")
        self.optimizer.check_not_begun("backward")
        share = 1 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        factor = share * self.optimizer.loss_scale
        try:
            with (self.progress.syncing(allreduce_gradients), BaseEngine.running_backward.of(self, factor),
                  sigint_handler(), self.during("backward"), self._stepping_in_backward(retain_graph)):
                _scaled(loss, factor).backward(retain_graph=retain_graph)
        except BaseException:
            if self.sharded is not None:
                self.sharded.interrupt()
            raise
        if self.guard is not None:
            self.guard.note_loss(loss)
        return _scaled(loss.detach(), share)

    def _stepping_in_backward(self, retain_graph: bool) -> AbstractContextManager[None]:
        """Return the context of the next backward pass, in which finished units are stepped where the configuration says."""
        assert self.optimizer is not None
        if not (self.optimizer.rules.in_backward and self.reduces_gradients() and self.is_gradient_accumulation_boundary()):
            return nullcontext()
        if retain_graph:
            raise UsageError("backward: retain_graph=True keeps a graph whose weights this pass is to step; add the losses "
                             "up and call backward once, or set offload_optimizer.step_in_backward to false")
        return self.optimizer.stepping_in_backward()

    @opaque
    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, to call `.backward()` on instead of `engine.backward(loss)`."""
        scaled = _scaled(loss, self.loss_scale() / self.gradient_accumulation_steps())
        if scaled.requires_grad:
            scaled.register_hook(self._begin_scaled_backward)
        return scaled

    @opaque
    def _begin_scaled_backward(self, gradient: Tensor) -> None:
        self.progress.begin_scaled_backward(backward_liveness())

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate without communication; the next synchronised backward, or `step`, reduces the accumulated gradients."""
        if not self.progress.sync:
            raise UsageError("no_sync: nested in another no_sync of this engine; leave the outer one first")
        with self.progress.syncing(False):
            yield

    @contextmanager
    def join(self) -> Generator[None]:
        """Let ranks have different numbers of batches within the context: each leaves it when the data of all has ended.

        A rank whose loop is over takes part in the forwards, backward passes and steps that other ranks still make. Its
        gradients are zero, and the mean still divides by all ranks, as DDP's `join` does by default. Every rank enters;
        a rank may have no batch at all. Raises `RanksDisagree` where ranks with data make different calls.
        """
        if self._joined is not None:
            raise UsageError("join: nested in another join of this engine; leave the outer one first")
        self.copy_due()
        self._joined = Join(self)
        try:
            yield
            self._joined.finish()
        except Exception as error:
            if not isinstance(error, CollectiveFailed):  # which tells of another rank
                self.failure_board.publish(f"rank {self.global_rank} left engine.join() by {type(error).__name__}: {error}")
            raise
        finally:
            self._joined = None

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the present microbatch is the last of a step, instead of counting.

        Raises `UsageError` for anything but True and False.
        """
        self.refuse_destroyed("set_gradient_accumulation_boundary")
        if is_boundary not in (True, False):
            raise UsageError(f"set_gradient_accumulation_boundary: got {is_boundary!r}; give True or False")
        self.progress.override_boundary(bool(is_boundary))

    @opaque
    @unbroken
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a boundary apply the gradients and advance the schedule; elsewhere count the microbatch.

        `lr_kwargs` go to the schedule's `step`. One whose `step` requires arguments, such as `ReduceLROnPlateau`, advances
        only with them (`{"metrics": loss}`), or when the script calls its `step` itself, after validation.
        Raises `UsageError` when no backward ran since the last step, `LossScaleError` when gradients overflow at the
        smallest loss scale. An interrupt (Ctrl-C) waits for the end of the step; a second one does not, and loses it.
        """
        self.begin_call("step")
        if self._joined is not None:
            self._joined.announce(JoinedCall.STEP)
        self.copy_due()  # where no forward of the model has come before
        self.progress.begin_step()
        boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            self.take_step(lr_kwargs or {})
        elif self.optimizer is not None:
            self.optimizer.check_not_begun("step within an accumulation")
            self.optimizer.collect_set_grads()
        self.progress.count_microbatches()
        if boundary:
            self.end_step()
            if self._joined is not None:  # a rank whose data has ended makes the calls of others in a mode of its own
                self.copy_due()
        self.end_call()


def _scaled(loss: Tensor, factor: float) -> Tensor:
    """Return `loss` times `factor`, in fp32 or wider; a factor of 1 leaves it, and its dtype, as it is."""
    return loss if factor == 1 else loss.to(wide_dtype(loss.dtype)) * factor


def _compare_batches(tensor_ranks: Communicator, batch: Any) -> None:
    """Raise `RanksDisagree` unless all tensor ranks have one batch: they compute parts of the same layers on it."""
    fingerprints = tensor_ranks.gather_objects(fingerprint_of(batch))
    first = fingerprints[0]
    for rank, other in enumerate(fingerprints):
        if other != first:
            got = "another batch of the same shape" if str(other) == str(first) else f"a batch of {other}"
            raise RanksDisagree(f"forward: rank 0 of the tensor axis got a batch of {first}, and rank {rank} {got}; give "
                                f"all tensor ranks the same samples: seed the loader by the data rank, "
                                f"engine.mesh.rank('data'), or give training_data to initialize")


def _compare_parts(sequence_ranks: Communicator, batch: Any) -> None:
    """Raise `RanksDisagree` unless the parts of the sequence ranks have one shape."""
    shapes = [str(each) for each in sequence_ranks.gather_objects(fingerprint_of(batch, values=False))]
    for rank, other in enumerate(shapes):
        if other != shapes[0]:
            raise RanksDisagree(f"forward: rank 0 of the sequence axis got a batch of {shapes[0]}, and rank {rank} one of "
                                f"{other}; give every rank an equal part of the same samples: "
                                f"engine.split_sequence(batch)")
