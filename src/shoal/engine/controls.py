"""The calls that change how an engine runs, beside its passes and steps: batch sizes, torch.compile, traces.

Every call of an engine begins and ends here: it names itself for errors and for the watch, and is refused after `destroy`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from shoal.config.batch import BatchSizes
from shoal.data.loader import Loader
from shoal.engine.accessors import Accessors
from shoal.engine.compiled import Compilation
from shoal.errors import NotSupportedYet, UsageError
from shoal.recording.page import TrainingPhase, page, phase_of
from shoal.tier import Trace
from shoal.transport.failure_board import FailureBoard

__all__ = ["Controls"]


class Controls(Accessors):
    """The controls, mixed into every engine. The engine provides the attributes that they use."""

    failure_board: FailureBoard
    compilation: Compilation
    training_dataloader: Any
    destroyed: bool = False
    """Whether `destroy` was called: the engine is detached from the model."""

    def begin_call(self, call: str) -> None:
        """Name the call, for errors of ranks that wait for each other. Raises `UsageError` after `destroy`."""
        self.failure_board.name_call(f"{call} after {self.progress.global_steps} steps")
        page.enter(phase_of(call), self.progress.global_steps)
        self.refuse_destroyed(call)

    def refuse_destroyed(self, call: str) -> None:
        """Raise `UsageError` after `destroy`."""
        if self.destroyed:
            raise UsageError(f"{call}: this engine was destroyed, and is detached from the model; use the module itself, or "
                             f"build another engine over it by shoal.initialize")

    def end_call(self) -> None:
        """Note that the script goes on between two calls of the engine."""
        page.enter(TrainingPhase.BETWEEN, self.progress.global_steps)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step by changing how many microbatches it accumulates.

        Raises `UsageError` unless it is a multiple of a microbatch on every rank, and within an accumulation.
        """
        self._set_batch("set_train_batch_size", self.batch.with_total, train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward, and with them those of a step; the loader follows.

        Raises `UsageError` unless it is a whole number of 1 or more, and within an accumulation.
        """
        self._set_batch("set_train_micro_batch_size", self.batch.with_micro, micro_batch_size)

    def _set_batch(self, call: str, change: Callable[[str, int], BatchSizes], samples: int) -> None:
        self.refuse_destroyed(call)
        batch = change(call, samples)
        if self.optimizer is not None and self.optimizer.has_gradients:
            raise UsageError(f"{call}: called within an accumulation; call it right after a step")
        self.batch = batch
        self.progress.change_accumulation(batch.accumulation)
        if isinstance(self.training_dataloader, Loader):
            self.training_dataloader.resize(batch.micro)

    @contextmanager
    def trace(self) -> Generator[Trace]:
        """Record events within the context, by lane and duration: forward, backward, step, waiting for state, reading and
        writing it.

        Raises `UsageError` within another such context of this engine.
        """
        self.begin_call("trace")
        assert self.sharded is not None
        storage = self.sharded.storage
        if storage.lanes.trace is not None:
            raise UsageError("trace: this engine is traced already, and one trace may run at a time; read the `events` of "
                             "the outer trace instead: it holds the events so far at any time")
        with storage.trace() as trace:
            yield trace

    def during(self, lane: str) -> AbstractContextManager[None]:
        """Return a context whose duration is an event of `lane`, if the engine is traced."""
        if self.sharded is None or self.sharded.storage.lanes.trace is None:
            return nullcontext()
        return self.sharded.storage.lanes.during(lane, type(self.module).__name__)

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, schedule: Any = None,
                compiled_autograd_enabled: bool = False) -> None:
        """Compile the forward of every block of the model by `torch.compile`; collectives stay outside of it.

        A model without repeated blocks is compiled as a whole. Raises `NotSupportedYet` for the other two options.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise NotSupportedYet("compile: schedule and compiled_autograd_enabled are not supported yet; leave them out")
        self.begin_call("compile")
        if self.is_compiled:
            return
        assert self.sharded is not None
        blocks = [module for module in self.sharded.by_module if module is not self.module] or [self.module]
        self.compilation.compile(blocks, partial(torch.compile, backend=backend, **dict(compile_kwargs or {})))

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called, or `initialize` was given a model that torch.compile had wrapped, or parts of it."""
        return bool(self.compilation)
