"""The rarer controls of an engine: plain state dicts, another batch size, reductions by hand, compilation.

Every one either does what its published name promises or says why it cannot.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.config.batch import BatchSizes
from shoal.data.loader import Loader
from shoal.engine import full_state_dict
from shoal.engine.checkpointer import Checkpointer
from shoal.errors import NotSupportedYet, UsageError
from shoal.tier import Trace


class Controls(Checkpointer):
    """The part of an engine that few scripts call."""

    enable_backward_allreduce: bool = True
    """Whether backward passes communicate; otherwise `allreduce_gradients` or `step` reduces what they left."""
    _compiled: tuple[nn.Module, ...] = ()
    _sync: bool = True

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate without communication; what is owed is reduced by the next synchronised backward or by `step`."""
        if not self._sync:
            raise UsageError("no_sync: nested in another no_sync of this engine; leave the outer one first")
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def module_state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False,
                          exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the module's own state dict, of the weights in the compute dtype, as views of the engine's buffers.

        At stage 3 raises `ReleasedError` outside `shoal.gathered(engine.module)`; `consolidated_state_dict` gathers.
        """
        state: dict[str, Any] = {} if destination is None else destination
        self.module.state_dict(destination=state, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    del state[prefix + name]
        return state

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None) -> None:
        """Take over a state dict of the module, or its entry 'module'; every rank calls it with the same one.

        Raises `UsageError` for tensors of another shape and, if `strict`, for names on one side only.
        """
        self.refuse_destroyed("load_module_state_dict")
        if custom_load_fn is not None:
            raise UsageError("load_module_state_dict: custom_load_fn is not supported: parameters may be sharded; write "
                             "within `with shoal.gathered(engine.module, modifier_rank=0)` instead")
        assert self.sharded is not None
        inner = checkpoint.get("module")
        state = cast("Mapping[str, Tensor]", inner if isinstance(inner, Mapping) else checkpoint)
        full_state_dict.load(self.sharded, state, strict=strict)

    def save_fp16_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """The older name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        return self.consolidated_state_dict(exclude_frozen=exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        return self.consolidated_state_dict(exclude_frozen=exclude_frozen_parameters)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step by changing how many microbatches it accumulates.

        Raises `UsageError` unless it is a multiple of a microbatch on every rank, and within an accumulation.
        """
        share = self.batch.micro * self.batch.data_ranks
        if train_batch_size < 1 or train_batch_size % share:
            raise UsageError(f"set_train_batch_size: got {train_batch_size}; it must be a multiple of {share} "
                             f"(microbatches of {self.batch.micro} on {self.batch.data_ranks} data ranks)")
        self._set_batch("set_train_batch_size", replace(self.batch, accumulation=train_batch_size // share))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward, and with them those of a step; the loader follows.

        Raises `UsageError` for less than 1, and within an accumulation.
        """
        if micro_batch_size < 1:
            raise UsageError(f"set_train_micro_batch_size: got {micro_batch_size}; it must be 1 or more")
        self._set_batch("set_train_micro_batch_size", replace(self.batch, micro=micro_batch_size))

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Reduce now what backward passes left unreduced; every rank calls it. `bucket_size` changes nothing here."""
        if self.sharded is not None:
            self.sharded.flush()

    def buffered_allreduce_fallback(self, grads: Any = None, elements_per_buffer: int = 500_000_000) -> None:
        """Do the same as `allreduce_gradients`; raises `UsageError` for `grads` of the caller's."""
        if grads is not None:
            raise UsageError("buffered_allreduce_fallback: grads is not supported: the engine collects gradients itself; "
                             "reduce your own with torch.distributed.all_reduce")
        self.allreduce_gradients(elements_per_buffer)

    @contextmanager
    def trace(self) -> Generator[Trace]:
        """Record what is done within the context, on which lane and for how long: forward, backward, step, waiting for
        state, reading and writing it.

        Raises `UsageError` within another such context of this engine: what is done has one listener.
        """
        self.refuse_destroyed("trace")
        assert self.sharded is not None
        residence = self.sharded.residence
        if residence.lanes.trace is not None:
            raise UsageError("trace: this engine is traced already, and has one listener; read the `events` of the outer "
                             "trace instead: those so far are there at any time")
        with residence.trace() as trace:
            yield trace

    def during(self, lane: str) -> AbstractContextManager[None]:
        """Return a context whose time is an event of `lane`, if somebody traces."""
        if self.sharded is None or self.sharded.residence.lanes.trace is None:
            return nullcontext()
        return self.sharded.residence.lanes.during(lane, type(self.module).__name__)

    def empty_partition_cache(self) -> None:
        """Release every gathered parameter that nobody holds, and the allocator's unused memory."""
        if self.sharded is not None:
            for unit in self.sharded.units:
                unit.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def offload_states(self, include: Any = None, device: str = "cpu", pin_memory: bool = True,
                       non_blocking: bool = False) -> None:
        """Raise `NotSupportedYet`."""
        raise NotSupportedYet("offload_states: not supported yet: state rests where the configuration says; save a "
                              "checkpoint and call engine.destroy() to free the memory")

    def reload_states(self, non_blocking: bool = False) -> None:
        """Raise `NotSupportedYet`."""
        raise NotSupportedYet("reload_states: not supported yet, as offload_states is not; leave both out")

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, schedule: Any = None,
                compiled_autograd_enabled: bool = False) -> None:
        """Compile the forward of every block of the model by `torch.compile`; collectives stay outside of it.

        A model without repeated blocks is compiled as a whole. Raises `NotSupportedYet` for the other two options.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise NotSupportedYet("compile: schedule and compiled_autograd_enabled are not supported yet; leave them out")
        if self.is_compiled:
            return
        assert self.sharded is not None
        around = tuple(module for module in self.sharded.by_module if module is not self.module) or (self.module,)
        for module in around:
            module.forward = torch.compile(module.forward, backend=backend, **dict(compile_kwargs or {}))
        self._compiled = around

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return bool(self._compiled)

    def restore_forwards(self) -> None:
        """Undo `compile`."""
        for module in self._compiled:
            del module.forward
        self._compiled = ()

    def _set_batch(self, call: str, batch: BatchSizes) -> None:
        if self.optimizer is not None and self.optimizer.pending:
            raise UsageError(f"{call}: called within an accumulation; call it right after a step")
        self.batch = batch
        self.micro_steps = self.global_steps * batch.accumulation  # a step begins, of the new length
        if isinstance(self.training_dataloader, Loader):
            self.training_dataloader.resize(batch.micro)
