"""The engine: the user's loop, `engine(batch)`, `engine.backward(loss)`, `engine.step()`, around an unchanged model.

A step counts at the end of accumulation, the boundary; between boundaries `step()` only counts the microbatch. What
rests where, and when it travels, is decided in `zero`; how a step is taken in `optim`; this file only connects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal import comm
from shoal.engine.controls import Controls
from shoal.engine.frozen_check import FrozenParamCheck
from shoal.engine.lost import fill_nan, missing, named
from shoal.engine.replicated_grads import ReplicatedGradCheck
from shoal.engine.schema import Config
from shoal.errors import RanksDisagree, TierError, UsageError
from shoal.fingerprint import fingerprint_of
from shoal.interrupts import unbroken, watched
from shoal.log import logger, warn_once
from shoal.mesh.mesh import Mesh
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.optim.sharded import ShardedOptimizer
from shoal.schedule.registry import AnySchedule
from shoal.transport.collectives import Communicator
from shoal.transport.failure_board import FailureBoard
from shoal.tree import tree_map
from shoal.zero.sharded import ShardedModel


@dataclass(slots=True)
class UnderWay:
    """A backward that an engine has called: not an attribute of the class, which would look everything up anew after it."""

    factor: float | None = None
    """That of its loss; None where there is none."""


class Engine(Controls):
    """One model in training. Build it with `shoal.initialize`."""

    under_way: ClassVar[UnderWay] = UnderWay()
    """The backward that some engine of this process is running."""

    announces: ClassVar[bool] = False
    """Whether each backward pass of a root is announced before it runs: see `Hooks.as_pass`."""

    def __init__(self, model: nn.Module, config: Config, mesh: Mesh, parameter_groups: ParameterGroups, board: FailureBoard,
                 device: torch.device):
        super().__init__()
        self.module = model
        self.settings = config
        self.batch = config.batch
        self.mesh = mesh
        self.parameter_groups = parameter_groups
        self.board = board
        self.communicator = parameter_groups.data
        """The data ranks."""
        self.device = device
        self.optimizer: ShardedOptimizer | None = None
        self.client_optimizer: object = None
        self.lr_scheduler: AnySchedule | None = None
        self.sharded: ShardedModel | None = None
        self.training_dataloader: Any = None
        self.frozen = FrozenParamCheck(())
        """What is not trained."""
        self.copies: ReplicatedGradCheck | None = None
        """What each tensor rank has whole, whose gradients are to be compared."""
        self.micro_steps = 0
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self._applied = False
        self._boundary: bool | None = None
        self._unstepped = False  # a backward pass has begun since the last call of `step`
        self._scaled = False
        self._batches_compared = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        At the first call (with `debug` at each) raises `RanksDisagree` where the tensor ranks got different batches.
        """
        self.refuse_destroyed("forward")
        if self.parameter_groups.tensor is not None and (self.settings.debug or not self._batches_compared):
            _refuse_other_batches(self.parameter_groups.tensor, (args, kwargs))
            self._batches_compared = True
        if self.settings.fp16.auto_cast and self.settings.fp16.enabled:
            args, kwargs = half(args), half(kwargs)
        try:
            with watched(), self.during("forward"):
                return self.module(*args, **kwargs)
        finally:
            for each in () if self.sharded is None else self.sharded.passes:
                each.stop_saving()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *,
                 allreduce_gradients: bool = True, release_loss: bool = False) -> Tensor:
        """Accumulate the gradients of `loss`, a scalar that this engine's forward gave.

        The gradients of a boundary are the mean over microbatches and data ranks: `loss` is divided by
        `gradient_accumulation_steps` unless `scale_wrt_gas` is false. Returns the loss so divided, without loss scale.
        With `allreduce_gradients` false nothing is reduced before `step`; `release_loss` is published, and the loss is
        never kept.
        """
        self.refuse_destroyed("backward")
        if self.optimizer is None:
            raise UsageError("backward: the engine has no optimizer; give initialize one, or name one in the configuration")
        if loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(f"backward: got a tensor of shape {tuple(loss.shape)} "
                             f"{'with' if loss.requires_grad else 'without'} a graph; pass the scalar loss that the "
                             f"engine's forward led to, with gradients enabled")
        self.optimizer.check_not_begun("backward")
        share = 1 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        factor = share * self.optimizer.loss_scale
        self._scaled = True
        sync, self._sync = self._sync, self._sync and allreduce_gradients
        outer, Engine.under_way.factor = Engine.under_way.factor, factor
        try:
            with watched(), self.during("backward"), self._steps_within(retain_graph):
                _times(loss, factor).backward(retain_graph=retain_graph)
        except BaseException:
            if self.sharded is not None:
                self.sharded.interrupt()
            raise
        finally:
            self._sync, Engine.under_way.factor = sync, outer
        return _times(loss.detach(), share)

    def _steps_within(self, retain_graph: bool) -> AbstractContextManager[None]:
        """Return the context in which the next backward pass steps what it has finished, if it is to."""
        assert self.optimizer is not None
        if not (self.optimizer.rules.in_backward and self.synchronising() and self.is_gradient_accumulation_boundary()):
            return nullcontext()
        if retain_graph:
            raise UsageError("backward: retain_graph=True keeps a graph whose weights this pass is to step; add the losses "
                             "up and call backward once, or set offload_optimizer.step_in_backward to false")
        return self.optimizer.within_backward()

    def scale(self, loss: Tensor) -> Tensor:
        """Return what to call `.backward()` on instead of `engine.backward(loss)`."""
        self._scaled = True
        return _times(loss, (self.optimizer.loss_scale if self.optimizer else 1.0) / self.gradient_accumulation_steps())

    @unbroken
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a boundary apply the gradients and advance the schedule; elsewhere count the microbatch.

        `lr_kwargs` go to the schedule's `step`. A `ReduceLROnPlateau` advances only with them
        (`{"metrics": loss}`), or when the script calls its `step` itself, after validation.
        Raises `UsageError` when no backward ran since the last step, `LossScaleError` when gradients overflow at the
        smallest loss scale. An interrupt (Ctrl-C) waits for the end of the step; a second one does not, and loses it.
        """
        self.refuse_destroyed("step")
        self._applied = self._unstepped = False
        if self.is_gradient_accumulation_boundary():
            self._take_step(lr_kwargs or {})
        elif self.optimizer is not None:
            self.optimizer.check_not_begun("step within an accumulation")
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present microbatch is the last of a step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the present microbatch is the last of a step, instead of counting."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget accumulated gradients. Within an accumulation they are kept, for `step` consumes them. But after a backward
        that no call of `step` has followed, as it failed or was interrupted, the accumulation begins anew; where boundaries
        are set by hand, `engine.optimizer.zero_grad()` forgets it.
        """
        since = self.micro_steps % self.gradient_accumulation_steps()
        if self.optimizer is not None and self._boundary is None and (self._unstepped or not since):
            self.optimizer.zero_grad()
            self._unstepped, self.micro_steps = False, self.micro_steps - since

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` changed the weights."""
        return self._applied

    def destroy(self) -> None:
        """Detach from the model, and leave it whole and plain; print the record of `comms_logger`. Every rank calls it.

        What fails is raised once the engine is detached all the same: the `CheckpointError` of a save that nobody has
        waited for, the `TierError` or `CollectiveFailed` of weights that cannot be had any more. Their units are logged;
        such parameters are not a number, take memory when they are first used, and may be written like any others. The
        engine is of no use afterwards, and says so; another call does nothing.
        """
        if self.destroyed:
            return
        self.destroyed = True
        try:
            self.wait_for_checkpoint()
            if self.settings.comms_logger.enabled:
                comm.log_summary()
        finally:
            self._detach()

    @property
    def roots(self) -> Mapping[nn.Module, str]:
        """The modules whose forwards are passes of their own, by name: the model."""
        return {self.module: ""}

    @property
    def aliases(self) -> Mapping[str, str]:
        """The names of parameters in the whole model, where they are others than in the module."""
        return {}

    def before_backward(self) -> None:
        """Check that a backward pass was scaled as this engine needs it."""
        assert self.optimizer is not None
        self._unstepped = True
        self.optimizer.check_not_begun("backward")
        self.frozen.check(self.global_rank)
        self.optimizer.settle()  # of units that this forward did not use
        if self._scaled:
            self._scaled = False
            return
        wanted, under_way = self.optimizer.loss_scale / self.gradient_accumulation_steps(), Engine.under_way.factor
        if under_way == wanted:  # one loss may lead through several engines
            return
        if under_way is not None:
            raise UsageError(f"one loss leads through two engines that scale it differently: the one whose backward was "
                             f"called by {under_way:g}, this one by {wanted:g}; give both the same "
                             f"gradient_accumulation_steps and the same static fp16.loss_scale")
        if self.optimizer.loss_scale != 1:
            raise UsageError(f"loss.backward() was called on an unscaled loss while the loss scale is "
                             f"{self.optimizer.loss_scale:g}; call engine.backward(loss), or engine.scale(loss).backward()")
        if self.gradient_accumulation_steps() > 1:
            warn_once("loss.backward() does not divide by gradient_accumulation_steps; divide the loss yourself, or call "
                      "engine.backward(loss)")

    def synchronising(self) -> bool:
        """Whether backward passes communicate at present."""
        return self._sync and self.enable_backward_allreduce

    @unbroken
    def _detach(self) -> None:
        """Let go of the model, and of what of it is lost."""
        self.restore_forwards()
        if self.copies is not None:
            self.copies.forget()
        if self.sharded is None:
            return
        try:
            if self.optimizer is not None:
                self.optimizer.close()
        finally:
            self._give_back(self.sharded)

    def _give_back(self, sharded: ShardedModel) -> None:
        try:
            sharded.destroy()
        except Exception as error:
            if units := missing(sharded):
                logger.error("rank %d: destroy: the parameters of %s cannot be had any more, and are not a number from here "
                             "on. (%s)", self.global_rank, named(units), error)
                fill_nan(units)
            raise

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        if self.optimizer is None:
            raise UsageError("step: the engine has no optimizer; give initialize one, or name one in the configuration")
        if not self._sync:
            raise UsageError("step: called inside no_sync; leave it first, so that all ranks reduce the same")
        for communicator in self.parameter_groups.communicators:
            communicator.step = self.global_steps
        if self.copies is not None and self.parameter_groups.tensor is not None:
            again = self.copies.compare(self.parameter_groups.tensor, again=self.settings.debug)
            self.copies = self.copies if again else None
        try:
            self._applied = self.optimizer.step()
        except TierError as error:  # of this rank alone, for which the others wait
            self.board.publish(f"rank {self.global_rank}: step {self.global_steps + 1}: {error}")
            raise
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if not self._applied:
            self.skipped_steps += 1
            logger.warning("step %d: gradients overflowed, the step is skipped; loss scale is now %g",
                           self.global_steps, self.optimizer.loss_scale)
        elif self.lr_scheduler is not None and (lr_kwargs or not isinstance(self.lr_scheduler, ReduceLROnPlateau)):
            self.lr_scheduler.step(**lr_kwargs)
        every = self.settings.steps_per_print
        if every and self.global_steps % every == 0 and self.parameter_groups.world.rank == 0:
            logger.info("step=%d, skipped=%d, lr=%s, mom=%s", self.global_steps, self.skipped_steps, self.get_lr(),
                        self.get_mom())


def _times(loss: Tensor, factor: float) -> Tensor:
    return loss if factor == 1 else loss.to(torch.promote_types(loss.dtype, torch.float32)) * factor


def _refuse_other_batches(tensor_ranks: Communicator, batch: Any) -> None:
    """Raise `RanksDisagree` unless all tensor ranks have one batch: they compute parts of the same layers on it."""
    said = tensor_ranks.gather_objects(fingerprint_of(batch))
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            what = "another batch of the same shape" if str(theirs) == str(said[0]) else f"a batch of {theirs}"
            raise RanksDisagree(f"forward: rank 0 of the tensor axis got a batch of {said[0]}, and rank {rank} {what}; give "
                                f"all tensor ranks the same samples: seed the loader by the data rank, "
                                f"engine.mesh.rank('data'), or give training_data to initialize")


def half(value: Any) -> Any:
    """Cast the floating-point tensors within `value` to fp16."""
    return tree_map(lambda tensor: tensor.half() if tensor.is_floating_point() else tensor, value)
