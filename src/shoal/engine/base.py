"""The base of both engines: it owns the sharded model, the checkpointer, the counters and the optimizer, and takes steps.

An engine decides when passes run and when a step is due. What rests where, and when it travels, is decided in `zero`; how a
step is taken, in `optim`. This file connects them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from shoal import comm
from shoal.activation import ALONE, Moment, RecomputeMode, SavedActivations, recompute_blocks
from shoal.data.loader import Loader
from shoal.engine.backward_pass import RunningBackward, grad_refusal
from shoal.engine.buffer_sync import BufferSync
from shoal.engine.checkpointer import Checkpointer
from shoal.engine.checks import FrozenParamCheck, ReplicatedGradCheck
from shoal.engine.compiled import Compilation
from shoal.engine.controls import Controls
from shoal.engine.lost_units import give_back
from shoal.engine.optimizer_calls import OptimizerCalls
from shoal.engine.progress import Progress
from shoal.engine.schema import Config
from shoal.engine.state_dicts import StateDicts
from shoal.engine.survival import StepJudge, open_guard, open_vault
from shoal.engine.training_objects import TrainingObjects
from shoal.errors import GuardError, TierError, UsageError
from shoal.interrupts import unbroken, uninterrupted
from shoal.log import logger, warn_once
from shoal.mesh.mesh import Mesh
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.optim.sharded import ShardedOptimizer
from shoal.precision.policy import Policy
from shoal.recording.page import TrainingPhase, page
from shoal.schedule.registry import AnySchedule, required_arguments
from shoal.tier import StoragePlan
from shoal.transport.failure_board import FailureBoard
from shoal.tree import tree_map
from shoal.zero.reducer import BackwardPass
from shoal.zero.sharded import ShardedModel, ShardingPlan, TiedBuffer

__all__ = ["BaseEngine"]


class BaseEngine(Controls, nn.Module):
    """One model in training. `shoal.initialize` builds an `Engine` or a `PipelineEngine`."""

    running_backward: ClassVar[RunningBackward] = RunningBackward()
    """The backward pass that an engine of this process is running."""

    engines: ClassVar[WeakKeyDictionary[nn.Module, ReferenceType[BaseEngine]]] = WeakKeyDictionary()
    """The engines of this process, by model."""

    has_explicit_passes: ClassVar[bool] = False
    """Whether each backward pass of a root is a call of `BackwardHooks.run_as_pass`."""

    enable_backward_allreduce: bool = True
    """Whether backward passes communicate; otherwise `allreduce_gradients` or `step` reduces their gradients."""

    def __init__(self, model: nn.Module, config: Config, mesh: Mesh, parameter_groups: ParameterGroups,
                 failure_board: FailureBoard, device: torch.device, compilation: Compilation):
        super().__init__()
        self.module = model
        self.settings = config
        self.batch = config.batch
        self.mesh = mesh
        self.parameter_groups = parameter_groups
        self.failure_board = failure_board
        self.communicator = parameter_groups.data
        """The data ranks."""
        self.device = device
        self.progress = Progress()
        vault = open_vault(config, parameter_groups)
        self.checkpointer = Checkpointer(config, parameter_groups, device, vault)
        self.guard = open_guard(config, parameter_groups, vault)
        """Refuses steps that are outliers; None if the configuration has no guard, or no memory outlives the ranks."""
        self.step_judge: StepJudge | None = None
        self.optimizer: ShardedOptimizer | None = None
        self.client_optimizer: object = None
        self.lr_scheduler: AnySchedule | None = None
        self.training_dataloader: Any = None
        self.sharded: ShardedModel | None = None
        self.frozen_parameters = FrozenParamCheck(())
        self.buffer_sync: BufferSync | None = None
        """Sends rank 0's buffers to the data ranks; None where there is nothing to send."""
        self.replicated_grads: ReplicatedGradCheck | None = None
        """Compares the gradients of parameters that every tensor rank holds whole; None once they were found equal."""
        self.compilation = compilation
        """The modules that torch.compile compiles, or is to compile."""
        self.activations: SavedActivations | None = None
        """Where saved tensors rest until backward; None: on the device."""
        self.recomputed: list[nn.Module] = []
        """The blocks that recompute their activations in backward."""

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the module that the engine lacks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = vars(self).get("_modules", {}).get("module")
            if module is None:
                raise
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(f"neither {type(self).__name__} nor its module {type(module).__name__} has an attribute "
                                 f"'{name}'") from None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Accept `to`, `half`, `cuda` and the like where they change nothing.

        Raises `UsageError` where they would move or cast the parameters away from the engine's buffers.
        """
        probe = torch.empty(0, dtype=self.policy.compute, device=self.device)
        moved = fn(probe)
        if (moved.dtype, moved.device) != (probe.dtype, probe.device):
            raise UsageError(f"the engine's model is {probe.dtype} on {probe.device} and cannot become {moved.dtype} on "
                             f"{moved.device}: its parameters are views of the engine's buffers. Convert the model before "
                             f"initialize, set fp16 or bf16 in the configuration, or call engine.destroy() first")
        return self

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raise `UsageError`: an engine has process groups and the buffers of its model."""
        raise UsageError(f"this {type(self).__name__} can be neither copied nor pickled: copy engine.module (at stage 3 "
                         f"within shoal.gathered(engine.module)), or save a checkpoint by engine.save_checkpoint")

    __reduce_ex__ = __deepcopy__  # pyright: ignore[reportAssignmentType]  the protocol is of no interest

    # Building, by `initialize`

    @property
    def roots(self) -> Mapping[nn.Module, str]:
        """The modules whose forwards are passes of their own, by name: the model."""
        return {self.module: ""}

    @property
    def aliases(self) -> Mapping[str, str]:
        """The names in the whole model of parameters that have other names in the module."""
        return {}

    @property
    def tied_buffers(self) -> Mapping[str, TiedBuffer]:
        """The buffers that several pipeline stages have, by their names in the module."""
        return {}

    def shard(self, trained: dict[nn.Parameter, int], plan: ShardingPlan, policy: Policy,
              storage: StoragePlan) -> ShardedModel:
        """Shard the model, of which `trained` are the parameters that an optimizer steps, by their group."""
        self.policy = policy
        sharded = self.sharded = ShardedModel(self.module, self.parameter_groups, storage, aliases=self.aliases,
                                              tied_buffers=self.tied_buffers)
        self.state_dicts = StateDicts(sharded, self.begin_call)
        self.activations = plan.activations
        sharded.shard(trained, plan, policy, roots=self.roots, explicit_passes=self.has_explicit_passes,
                      begin_pass=self.begin_pass, before_forward=self._before_forward)
        self.frozen_parameters = FrozenParamCheck(sharded.units)
        if self.parameter_groups.tensor is not None:
            self.replicated_grads = ReplicatedGradCheck(sharded.trainable)
        resharding = {module for module, units in sharded.by_module.items() if any(unit.reshards for unit in units)}
        self.compilation.apply(self.roots, self.module, resharding)
        if self.settings.broadcast_buffers:
            self.buffer_sync = BufferSync(self.module, self.parameter_groups.buffers) or None
        BaseEngine.engines[self.module] = ref(self)
        return sharded

    def moments(self) -> frozenset[Moment]:
        """Return the passes of a step whose activations are held at one time."""
        return ALONE

    def recompute(self, modules: list[nn.Module], mode: RecomputeMode) -> None:
        """Have blocks recompute their activations in backward, until the engine is destroyed."""
        self.recomputed = modules
        recompute_blocks(modules, mode)

    @classmethod
    def of(cls, model: nn.Module) -> BaseEngine | None:
        """Return the engine that trains `model`, None where there is none."""
        reference = cls.engines.get(model)
        engine = None if reference is None else reference()
        return None if engine is None or engine.destroyed else engine

    def attach(self, optimizer: ShardedOptimizer | None, lr_scheduler: AnySchedule | None, loader: Loader | None, *,
               client_optimizer: object, optimizer_calls: OptimizerCalls) -> None:
        """Attach the objects of the training loop.

        `client_optimizer` is the optimizer that `initialize` was given; `optimizer_calls` answer the calls to `optimizer`.
        Raises `VaultTooLarge` on every rank where memory has no room for copies.
        """
        self.optimizer, self.lr_scheduler, self.training_dataloader = optimizer, lr_scheduler, loader
        self.client_optimizer, self.optimizer_calls = client_optimizer, optimizer_calls
        if optimizer is not None:
            optimizer.set_owner(optimizer_calls)
        if self.guard is not None and self.sharded is not None:
            self.step_judge = StepJudge(self.guard, self.sharded, loader)
        if self.sharded is not None:
            self.checkpointer.reserve(self._training_objects())

    # Passes

    def cast_inputs(self, inputs: Any) -> Any:
        """Cast the floating-point tensors within `inputs` to fp16, where `fp16.auto_cast` asks for it."""
        if not (self.settings.fp16.enabled and self.settings.fp16.auto_cast):
            return inputs
        return tree_map(lambda tensor: tensor.half() if tensor.is_floating_point() else tensor, inputs)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present microbatch is the last of a step."""
        return self.progress.is_boundary(self.gradient_accumulation_steps())

    def reduces_gradients(self) -> bool:
        """Whether backward passes reduce gradients at present."""
        return self.progress.sync and self.enable_backward_allreduce

    def begin_pass(self, after_failure: bool) -> BackwardPass:
        """Count the backward pass that begins, wait for deferred steps, and describe the pass to the hooks.

        `after_failure`: the one before has failed, so that what it left of gradients is discarded.
        Raises `UsageError` if there is no optimizer, if backward has stepped units that `step` has not completed, if a
        parameter that was frozen at initialize requires a gradient, or if the loss is not scaled; `TierError` if a step
        failed halfway.
        """
        if self.optimizer is None:
            raise UsageError("backward: the engine has no optimizer; give initialize one, or name one in the configuration")
        if after_failure:
            self._discard_partial_gradients()
        own = BaseEngine.running_backward.caller in (None, self)
        if own and self.progress.holds_foreign_gradients:
            warn_once("backward: the next step also takes the gradients that another engine's backward left here, of a loss "
                      "that led through both models. To discard them call engine.zero_grad() first (Accelerate passes on no "
                      "optimizer.zero_grad()), or freeze this model in the other pass by requires_grad_(False)")
        if own or any(p.requires_grad for p in self.module.parameters()):
            self.progress.begin_backward(own=own)  # another's pass through a frozen model leaves no gradient
        self.optimizer.check_not_begun("backward")
        self.frozen_parameters.check(self.global_rank)
        self.optimizer.finish_deferred_steps()  # of units that this forward did not use
        if not self.progress.loss_is_scaled():
            BaseEngine.running_backward.check_factor(self, loss_scale=self.optimizer.loss_scale,
                                                     accumulation=self.gradient_accumulation_steps())
        refusal = grad_refusal(self.optimizer, shards_weights=self.zero_optimization_partition_weights(),
                               reduced_later=self.parameter_groups.tensor is not None or self.mesh.size("replica") > 1)
        return BackwardPass(boundary=self.is_gradient_accumulation_boundary(), sync=self.reduces_gradients(),
                            on_reduced=self.optimizer.on_reduced, grad_refusal=refusal)

    def _discard_partial_gradients(self) -> None:
        """Begin the accumulation anew, unless the script has done so: a pass has failed within it."""
        assert self.optimizer is not None
        if self.optimizer.has_gradients:
            logger.warning("rank %d: backward: the backward before this one has failed; the gradients that it left are "
                           "discarded, with those of its accumulation, as optimizer.zero_grad() after the exception does",
                           self.global_rank)
            self.optimizer.discard_gradients()
            self.progress.restart_accumulation(self.gradient_accumulation_steps())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard accumulated gradients at the start of an accumulation. Within one they are kept, for `step` consumes them.

        After a backward that no call of `step` has followed, because it failed or was interrupted, the accumulation begins
        anew. Where boundaries are set by hand, an accumulation starts with the engine's first own backward, and
        `engine.optimizer.zero_grad()` discards gradients within it.
        """
        progress, accumulation = self.progress, self.gradient_accumulation_steps()
        at_start = (progress.backward_begun or progress.micro_steps % accumulation == 0
                    if progress.boundary_override is None else not progress.own_passes)
        if self.optimizer is not None and at_start:
            self.optimizer.discard_gradients()
            progress.restart_accumulation(accumulation)
            if self.guard is not None:
                self.guard.forget()
            if not set_to_none:
                self.optimizer.keep_zeros(keep=True)

    # The step

    def take_step(self, lr_kwargs: dict[str, Any]) -> None:
        """Apply the accumulated gradients, advance the schedule and count the step; every rank calls it."""
        if self.optimizer is None:
            raise UsageError("step: the engine has no optimizer; give initialize one, or name one in the configuration")
        if not self.progress.sync:
            raise UsageError("step: called inside no_sync; leave it first, so that all ranks reduce the same")
        if self.sharded is not None and self.sharded.backward_has_failed and self.optimizer.has_gradients:
            raise UsageError("step: the backward before it has failed, and left gradients of a part of the model; call "
                             "optimizer.zero_grad() and a backward that succeeds first")
        for communicator in self.parameter_groups.communicators:
            communicator.note_step(self.global_steps)
        self.optimizer.call_step_hooks("pre")
        if self.replicated_grads is not None and self.parameter_groups.tensor is not None:
            more = self.replicated_grads.compare(self.parameter_groups.tensor, keep_checking=self.settings.debug)
            self.replicated_grads = self.replicated_grads if more else None
        try:
            applied = self.optimizer.take_step(None if self.step_judge is None else partial(
                self.step_judge.judge, self.global_steps + 1, self.training_dataloader, self.optimizer))
        except GuardError:
            self.checkpointer.wait_for_copy()  # the restart goes back to it
            raise
        except TierError as error:  # of this rank alone, for which the others wait
            self.failure_board.publish(f"rank {self.global_rank}: step {self.global_steps + 1}: {error}")
            raise
        if self.step_judge is not None:
            self.step_judge.forget(self.training_dataloader)
        if self.buffer_sync is not None:
            self.buffer_sync.sync()
        self.progress.count_step(self.train_batch_size(), applied=applied)
        if isinstance(self.training_dataloader, Loader):
            self.training_dataloader.note_step()
        if not applied:
            logger.warning("step %d: gradients overflowed, the step is skipped; loss scale is now %g",
                           self.global_steps, self.optimizer.loss_scale)
        else:
            self.optimizer.call_step_hooks("post")
        if applied and self.lr_scheduler is not None and (lr_kwargs or not required_arguments(self.lr_scheduler)):
            self.lr_scheduler.step(**lr_kwargs)
        every = self.settings.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            logger.info("step=%d, skipped=%d, lr=%s, mom=%s", self.global_steps, self.skipped_steps, self.get_lr(),
                        self.get_mom())

    # Checkpoints

    def save_checkpoint(self, save_dir: str | Path, tag: str | int | None = None,
                        client_state: Mapping[str, Any] | None = None, save_latest: bool = True,
                        exclude_frozen_parameters: bool = False) -> bool:
        """Save the whole training state as `save_dir/tag` (default tag: `global_stepN`); every rank calls it.

        `client_state` is any nest of JSON values, tensors and arrays. Returns True once the state is copied, or written
        where `checkpoint.async_save` is false. Raises `CheckpointError` (also for the save before this one), `UsageError`
        for client state that is no mapping, or needs pickle, `RanksDisagree` for differing tags where the configuration
        says so.
        """
        self.begin_call("save_checkpoint")
        if client_state is not None and not isinstance(client_state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  scripts pass lists
            raise UsageError(f"save_checkpoint: client_state: got a {type(client_state).__name__}; give a mapping of names "
                             f"to values, such as {{'epoch': 1}}")
        self.checkpointer.save(self._training_objects(), save_dir, tag, client_state=client_state or {},
                               save_latest=save_latest, exclude_frozen=exclude_frozen_parameters)
        self.end_call()
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the last save is complete; raises its `CheckpointError` on every rank if it failed."""
        self.checkpointer.wait()

    def load_checkpoint(self, load_dir: str | Path, tag: str | int | None = None, load_module_strict: bool = True,
                        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
                        load_module_only: bool = False, custom_load_fn: Any = None,
                        ) -> tuple[str | None, dict[str, Any] | None]:
        """Load `load_dir/tag` (default: the tag that the file `latest` names), saved at any stage on any number of ranks.

        With `resilience.vault`, a call without tag before this process's first step takes a copy in memory of more
        steps, or one of fewer where the checkpoint is damaged.

        Returns (path, client_state), or (None, None) with a warning when no tag is given and there is no `latest`.
        `load_module_only` takes the weights alone; with `load_module_strict` false, names that the checkpoint lacks keep
        their values. Raises `CheckpointError` on every rank, before anything is changed where that can be known.
        """
        self.begin_call("load_checkpoint")
        if custom_load_fn is not None:
            raise UsageError("load_checkpoint: custom_load_fn is not supported: tensors are filled in place by name; "
                             "rename them in the checkpoint, or load with load_module_strict=False")
        loaded = self.checkpointer.load(
            self._training_objects(), load_dir, tag, strict=load_module_strict, optimizer_states=load_optimizer_states,
            schedule_states=load_lr_scheduler_states, module_only=load_module_only)
        self.checkpointer.reserve(self._training_objects())  # a checkpoint may have state that no step would have made
        if self.step_judge is not None:
            self.step_judge.leave_samples_out(self.training_dataloader)
        self.end_call()
        return loaded

    def _training_objects(self) -> TrainingObjects:
        assert self.sharded is not None
        return TrainingObjects(sharded=self.sharded, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler,
                               dataloader=self.training_dataloader, progress=self.progress, guard=self.guard,
                               compute=self.policy.compute, accumulation=self.gradient_accumulation_steps())

    # The end

    def end_step(self) -> None:
        """Note the step for the copies in memory, once a call that took it has counted it."""
        if self.sharded is not None:
            self.checkpointer.note_step(self._training_objects())

    def _before_forward(self) -> None:
        """Take the copy that is due before a forward of the coming step."""
        if self.checkpointer.copy_is_due and self.checkpointer.copy_is_due_before_forward(
                grads=torch.is_grad_enabled(), training=any(module.training for module in self.module.modules())):
            self.copy_due()

    def copy_due(self) -> None:
        """Copy the state after the last step to memory where that is due; every rank calls it before it trains on."""
        if self.checkpointer.copy_is_due:
            with uninterrupted():
                self.checkpointer.copy_to_memory(self._training_objects())

    def destroy(self) -> None:
        """Detach from the model, and leave it whole and plain; print the record of `comms_logger`. Every rank calls it.

        Errors are raised once the engine is detached all the same: the `CheckpointError` of a save whose result was not
        asked for yet, the `TierError` or `CollectiveFailed` of weights that are lost. A log line names the units of lost
        weights; their parameters read as NaN, allocate memory at first use, and may be written like any others. The engine
        refuses every later call but `destroy`, which does nothing.
        """
        if self.destroyed:
            return
        self.failure_board.name_call(f"destroy after {self.progress.global_steps} steps")
        page.enter(TrainingPhase.END, self.progress.global_steps)
        self.destroyed = True
        if self.optimizer is not None and self.optimizer.begun:
            logger.warning("rank %d: destroy: backward has begun a step that engine.step() has not ended (offload_optimizer."
                           "step_in_backward): some weights have taken it, on this rank or another, and others have not; "
                           "call engine.step() before destroy", self.global_rank)
        try:
            self.checkpointer.end_copies()
            self.wait_for_checkpoint()
            if self.settings.comms_logger.enabled:
                comm.log_summary()
        finally:
            self._detach()

    @unbroken
    def _detach(self) -> None:
        """Remove the hooks, and give the model its parameters back, except for lost ones."""
        self.compilation.undo()
        recompute_blocks(self.recomputed, RecomputeMode.NONE)
        if self.activations is not None:
            self.activations.close()
        if self.replicated_grads is not None:
            self.replicated_grads.remove()
        if self.sharded is None:
            return
        try:
            if self.optimizer is not None:
                self.optimizer.close()
        finally:
            give_back(self.sharded, self.global_rank)
