"""The engine of a pipeline: `train_batch(data_iter)` runs every microbatch of a step over all stages, and steps.

Each stage is a root of its own: its own passes gather, reduce and release its units, so that every ZeRO stage and tier works
as it does without a pipeline. This file adds the order of the passes (a schedule), the source of the microbatches, and the
loss, which every rank receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.activation import Moment
from shoal.data import RepeatingLoader
from shoal.engine.base import BaseEngine
from shoal.engine.mesh_setup import aliases_of
from shoal.errors import NotSupportedYet, PipelineError, UsageError
from shoal.interrupts import uninterrupted
from shoal.pipeline.check import check
from shoal.pipeline.executor import Batches, Executor
from shoal.pipeline.in_flight import moments
from shoal.pipeline.links import Connector, Links
from shoal.pipeline.microbatch_source import MicrobatchSource
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.schedules import SCHEDULES, PipelineSchedule, forward_only, known_schedule, make_schedule
from shoal.tree import tree_map
from shoal.zero.hooks import Hooks
from shoal.zero.sharded import TiedBuffer

__all__ = ["PipelineEngine"]


def _refused(name: str, reason: str) -> Callable[..., NoReturn]:
    """Return a published method that raises `PipelineError`: a pipeline has no such call, for this `reason`."""
    def refuse(self: BaseEngine, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `PipelineError`."""
        raise PipelineError(f"{name}: a pipeline {reason}")

    refuse.__name__, refuse.__qualname__ = name, f"PipelineEngine.{name}"
    return refuse


class PipelineEngine(BaseEngine):
    """One pipeline in training. Build it with `shoal.initialize`, from a `PipelineModule`."""

    module: PipelineModule
    has_explicit_passes = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.settings.zero_optimization.offload_optimizer.step_in_backward:
            raise NotSupportedYet("zero_optimization.offload_optimizer.step_in_backward: a pipeline takes its step when all "
                                  "its microbatches are through: set it to false")
        self._schedules: dict[int, PipelineSchedule] = {}
        self._moments: dict[int, frozenset[Moment]] = {}
        self.data_iterator: Iterator[Any] | None = None
        """Where microbatches are drawn from if `train_batch` is given no iterator."""
        self.batch_fn: Callable[[Any], Any] | None = None
        """Called on each item of an iterator."""
        self._source = MicrobatchSource(
            self.parameter_groups.world, self.failure_board,
            coordinates=(self.mesh.rank("data"), self.mesh.rank("sequence")),
            has_first_stage=self.is_first_stage(), has_last_stage=self.is_last_stage(), label=self._label,
            compare_values=self.settings.debug)
        self.agg_train_loss: Tensor | None = None
        """The loss of the last step."""
        self._schedule(1)  # raises before training for a schedule that does not fit the module

    def attach(self, *args: Any, **kwargs: Any) -> None:
        """Attach the objects of the training loop, and have the module recompute as the configuration says."""
        super().attach(*args, **kwargs)
        if interval := self.settings.pipeline.activation_checkpoint_interval:
            self.module.set_checkpoint_interval(interval)

    @property
    def roots(self) -> Mapping[nn.Module, str]:
        """The stages of this rank."""
        return {stage: f"stage {number}" for number, stage in zip(self.module.numbers, self.module.stages, strict=True)}

    def moments(self) -> frozenset[Moment]:
        """Return the passes of a step whose activations are held at one time, by the schedule."""
        count = self.gradient_accumulation_steps()
        if count not in self._moments:
            self._moments[count] = moments(self._schedule(count), self.stage_id)
        return self._moments[count]

    @property
    def aliases(self) -> Mapping[str, str]:
        """The names in the whole model of weights that several stages share, by their names on this rank."""
        return aliases_of(self.module)

    @property
    def tied_buffers(self) -> Mapping[str, TiedBuffer]:
        """The buffers of modules that layers of several stages share."""
        return self.module.tied_buffers

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on `gradient_accumulation_steps` microbatches and take a step; every rank of the job calls it.

        `data_iter` yields (inputs, labels) of one microbatch at a time. The ranks of the first and the last stage draw from
        it, each the samples of its data rank: both need the same ones, in the same order. The default is the loader of
        `training_data`. Returns the mean loss over microbatches and data ranks, on every rank, in fp32.

        Raises `PipelineError` when a rank fails; `DataEnded` where the iterator ends, before anything is trained;
        `UsageError` without an optimizer, with gradients disabled, or without data; and at the first step (with `debug` at
        each) `RanksDisagree` where ranks that share a data rank drew different samples.
        """
        self.begin_call("train_batch")
        if self.optimizer is None:
            raise UsageError("train_batch: the engine has no optimizer; give initialize one, or name one in the "
                             "configuration")
        if not torch.is_grad_enabled():
            raise UsageError("train_batch: gradients are disabled; call it outside of torch.no_grad(), or call eval_batch")
        count = self.gradient_accumulation_steps()
        schedule = self._schedule(count)
        self._executor.refuse_failed()
        self.copy_due()
        call = f"train_batch of {count} microbatches"
        self.failure_board.start_call(call)
        batches = self._draw(data_iter, count, call)
        losses = self._executor.run(schedule, self.stage_id, batches, self._factor)
        if self.guard is not None:
            for loss in losses:
                self.guard.note_loss(loss)
        self.progress.begin_step()
        with uninterrupted(), self._executor.joint_operation(f"the end of step {self.global_steps + 1}"):
            self.take_step({})
            self.progress.count_microbatches(count)
            self.agg_train_loss = self._mean(losses)
            self.end_step()
        self.end_call()
        return self.agg_train_loss

    def eval_batch(self, data_iter: Iterator[Any], return_logits: bool = False, compute_loss: bool = True,
                   reduce_output: str | None = "avg", bcast_loss: bool = True, num_micro_batches: int | None = None) -> Any:
        """Run microbatches of any size forward, without gradients; every rank of the job calls it.

        Returns the mean loss over microbatches and data ranks, or with `reduce_output` None the losses of this data rank by
        microbatch, on every rank (with `bcast_loss` false on the last stage only, None elsewhere). With `return_logits`
        returns (loss, outputs): the last stage's outputs, joined along the first dim if they are tensors, None elsewhere.
        Draws `num_micro_batches` microbatches (default: `gradient_accumulation_steps`).
        """
        loss, outputs = self.evaluate(
            data_iter, compute_loss=compute_loss, keep_outputs=return_logits, reduce_output=reduce_output,
            bcast_loss=bcast_loss, num_micro_batches=num_micro_batches)
        return (loss, _joined(outputs)) if return_logits else loss

    def evaluate(self, data_iter: Iterator[Any], *, compute_loss: bool, keep_outputs: bool, reduce_output: str | None,
                 bcast_loss: bool, num_micro_batches: int | None) -> tuple[Any, list[Any]]:
        """Do the work of `eval_batch`; return the loss, and the last stage's outputs by microbatch ([] elsewhere)."""
        self.begin_call("eval_batch")
        if reduce_output not in ("avg", None):
            raise UsageError(f"eval_batch: reduce_output: got {reduce_output!r}; choose 'avg' or None")
        count = self.gradient_accumulation_steps() if num_micro_batches is None else num_micro_batches
        if type(count) is not int or count < 1:
            raise UsageError(f"eval_batch: num_micro_batches: got {count!r}; give a whole number of 1 or more, or None for "
                             f"the {self.gradient_accumulation_steps()} of a step")
        schedule = forward_only(ranks=self.num_stages, microbatches=count, owner=self.module.owner)
        self._executor.refuse_failed()
        call = (f"eval_batch of {count} microbatches, compute_loss={compute_loss}, reduce_output={reduce_output!r}, "
                f"bcast_loss={bcast_loss}")
        self.failure_board.start_call(call)
        batches = self._draw(data_iter, count, call)
        if self.optimizer is not None:
            self.optimizer.finish_deferred_steps()
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            results = self._executor.evaluate(schedule, self.stage_id, batches, losses=compute_loss, outputs=keep_outputs)
        finally:
            for module in sorted(modes, key=lambda each: -sum(1 for _ in each.modules())):  # outer ones first: a script
                module.train(modes[module])  # may keep some parts in evaluation
        self.checkpointer.note_evaluation(training=False)
        loss: Any = None
        if compute_loss:
            losses = [value.detach().float().reshape(()) for _, value in results]
            with self._executor.joint_operation("the end of an evaluation"):
                loss = self._mean(losses) if reduce_output == "avg" else self._from_last(losses)
            if not bcast_loss and not self.is_last_stage():
                loss = None
        return loss, [output for output, _ in results] if keep_outputs else []

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Draw microbatches from `loader`, from its start again after its end, where `train_batch` is given no iterator."""
        self.data_iterator = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Draw microbatches from `iterator` where `train_batch` is given none."""
        self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Call `fn` on each item of the iterator; it returns (inputs, labels)."""
        self.batch_fn = fn

    @property
    def grid(self) -> Any:
        """The mesh, under the name of published scripts."""
        return self.mesh

    @property
    def stage_id(self) -> int:
        """This rank's coordinate on the pipeline axis."""
        return self.mesh.rank("pipeline")

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline axis."""
        return self.mesh.size("pipeline")

    @property
    def micro_batches(self) -> int:
        """Microbatches of a step."""
        return self.gradient_accumulation_steps()

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage."""
        return 0 in self.module.numbers

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage."""
        return len(self.module.owner) - 1 in self.module.numbers

    def get_pipeline_parallel_rank(self) -> int:
        """The same as `stage_id`."""
        return self.stage_id

    def get_additional_losses(self) -> Any:
        """Return the losses that the module reports beside its own."""
        return self.module.get_additional_losses()

    def reset_activation_shape(self) -> None:
        """Do nothing: microbatches may differ in shape at any time."""

    # Published calls of one pass, which a pipeline runs by itself

    forward = _refused("forward", "runs whole steps; call engine.train_batch(data_iter), or engine.eval_batch")
    backward = _refused("backward", "runs whole steps; call engine.train_batch(data_iter)")
    step = _refused("step", "steps at the end of engine.train_batch(data_iter)")
    scale = _refused("scale", "scales its losses itself; call engine.train_batch(data_iter)")
    no_sync = _refused("no_sync", "reduces the gradients of a step itself; call engine.train_batch(data_iter)")
    set_gradient_accumulation_boundary = _refused(
        "set_gradient_accumulation_boundary", "steps at the end of engine.train_batch(data_iter); call "
        "engine.set_train_batch_size to change how many microbatches that has")

    def destroy(self) -> None:
        """Detach from the model, and leave this rank's layers whole and plain. Every rank calls it."""
        try:
            if "_executor" in vars(self):
                self._executor.close()
        finally:
            super().destroy()

    @cached_property
    def _executor(self) -> Executor:
        connector = Connector(self.mesh, len(self.module.owner), self.device, self.settings.timeout)
        links = Links(self.module.owner, self.stage_id, connector)
        return Executor(dict(zip(self.module.numbers, self.module.stages, strict=True)), len(self.module.owner) - 1, links,
                        self.module.loss_fn, self._pass, may_be_freed=self._may_be_freed, label=self._label,
                        failure_board=self.failure_board)

    def _may_be_freed(self, tensor: Tensor) -> bool:
        """Whether `tensor` shares the memory of weights that are released after their use."""
        return any(each.shares_weights(tensor) for each in self._passes.values())

    @property
    def _factor(self) -> float:
        """The factor that the loss of a microbatch carries into its backward."""
        return self.loss_scale() / self.gradient_accumulation_steps()

    @cached_property
    def _passes(self) -> dict[int, Hooks]:
        """The hooks of each stage of this rank, by its number."""
        assert self.sharded is not None
        return dict(zip(self.module.numbers, self.sharded.passes, strict=True))

    def _pass(self, stage: int, run: Callable[[], None], last: bool, sync: bool) -> None:
        """Call `run` as a backward pass of one stage: the `last` of the step or not, and with communication or without."""
        try:
            with (self.progress.one_pass(boundary=last, sync=sync), BaseEngine.running_backward.of(self, self._factor),
                  self.during("backward")):
                self._passes[stage].backward.run_as_pass(run)
        except BaseException:
            for each in self._passes.values():
                each.backward.interrupt()
            raise

    def _schedule(self, count: int) -> PipelineSchedule:
        """Return the schedule of a step of `count` microbatches. Raises `UsageError` if the module's stages do not fit."""
        if count not in self._schedules:
            name = known_schedule(self.settings.pipeline.schedule or self.module.schedule)
            if not SCHEDULES[name].allows_stages(self.module.stages_per_rank):
                raise UsageError(f"pipeline.schedule: got {name!r}; the module was built for {self.module.schedule!r}, with "
                                 f"{self.module.stages_per_rank} stages on each rank: pass schedule={name!r} to "
                                 f"PipelineModule, which decides what each rank builds")
            schedule = make_schedule(name, ranks=self.num_stages, microbatches=count,
                                     stages_per_rank=self.module.stages_per_rank,
                                     in_flight=self.settings.pipeline.in_flight)
            if schedule.owner != self.module.owner:
                raise UsageError(f"pipeline.schedule: got {name!r}, which puts stages on ranks {list(schedule.owner)}; the "
                                 f"module was built for {self.module.schedule!r}, which puts them on "
                                 f"{list(self.module.owner)}; pass schedule={name!r} to PipelineModule")
            check(schedule)
            self._schedules[count] = schedule
        return self._schedules[count]

    def _draw(self, data_iter: Iterator[Any] | None, count: int, call: str) -> Batches:
        """Draw `count` microbatches, on which all ranks agree (`MicrobatchSource.draw`)."""
        def data() -> object:
            if data_iter is None and self.data_iterator is None and self.training_dataloader is not None:
                self.set_dataloader(self.training_dataloader)
            found = data_iter if data_iter is not None else self.data_iterator
            if found is None:
                raise UsageError(f"{call.partition(' ')[0]}: there is no data; pass an iterator, or training_data to "
                                 f"initialize")
            return found

        items = self._source.draw(data, count, call, steps=self.global_steps, change=self.batch_fn)
        return Batches(inputs=[inputs for inputs, _ in items] if self.is_first_stage() else [],
                       labels=[labels for _, labels in items] if self.is_last_stage() else [], to_device=self._to_device)

    @property
    def _label(self) -> str:
        """This rank and its stages, for errors."""
        return f"rank {dist.get_rank()} (stage {', '.join(map(str, self.module.numbers))})"

    def _to_device(self, value: Any) -> Any:
        return self.cast_inputs(tree_map(lambda tensor: tensor.to(self.device, non_blocking=True), value))

    def _mean(self, losses: list[Tensor]) -> Tensor:
        """Return the mean of the `losses` of all data ranks; ranks without the last stage have none."""
        mine = torch.stack([loss.float().reshape(()) for loss in losses]).mean() if losses else torch.zeros(
            (), dtype=torch.float32, device=self.device)
        words = _words(torch.stack([mine, torch.full_like(mine, float(bool(losses)))])).to(self.device)
        rows = self.parameter_groups.world.gather_words(words)
        values = rows.view(torch.float64)
        return (values[:, 0].sum() / values[:, 1].sum()).float().to(self.device)

    def _from_last(self, losses: list[Tensor]) -> list[Tensor]:
        """Return the last stage's losses, on all stages."""
        by_stage = self.parameter_groups.communicator("pipeline").gather_objects([loss.item() for loss in losses])
        return [torch.tensor(value, dtype=torch.float32, device=self.device)
                for value in next(values for values in by_stage if values)]


def _words(values: Tensor) -> Tensor:
    return values.to(torch.float64).view(torch.int64)


def _joined(outputs: list[Any]) -> Any:
    if not outputs:
        return None
    return torch.cat(outputs) if all(isinstance(output, Tensor) and output.dim() for output in outputs) else outputs
