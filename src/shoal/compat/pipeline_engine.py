"""The pipeline engine under its published names.

The published pipeline engine is a subclass of the published engine, and Shoal's are siblings; so
`isinstance(pipeline_engine, DeepSpeedEngine)` is answered by registration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.compat.deepspeed.runtime.pipe.module import PipelineModule
from shoal.compat.deepspeed.runtime.pipe.schedule import TrainSchedule
from shoal.compat.engine import DeepSpeedEngine, PublishedEngine
from shoal.compat.raising import as_published, published_errors
from shoal.engine.pipeline_engine import PipelineEngine as NativePipelineEngine
from shoal.errors import UsageError

__all__ = ["PipelineEngine"]


class _NoSuchReduction(UsageError, NotImplementedError):
    """A `reduce_output` that is unknown."""


class PipelineEngine(PublishedEngine, NativePipelineEngine):
    """The engine that `deepspeed.initialize` returns for a `PipelineModule`."""

    pipeline_parallelism = True
    pipeline_enable_backward_allreduce = True
    """The gradients of data ranks are summed when the schedule says so ..."""
    enable_backward_allreduce = False
    """... and not by calls of `backward`."""
    eval_return_logits = is_pipe_partitioned = is_grad_partitioned = using_bf16_optimizer = False
    log_batch_step_id = -1
    has_attention_mask: bool = False
    has_bool_tensors: bool = False

    def __init__(self, has_bool_tensors: bool = False, *super_args: Any, **super_kwargs: Any):
        super().__init__(*super_args, **super_kwargs)
        self.has_bool_tensors = has_bool_tensors

    @as_published
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on the microbatches of a step, in training mode; return their mean loss."""
        self.train()
        loss = super().train_batch(data_iter)
        self._report(train_loss=loss)
        return loss

    def eval_batch(self, data_iter: Iterator[Any], return_logits: bool = False, compute_loss: bool = True,
                   reduce_output: str | None = "avg", bcast_loss: bool = True, num_micro_batches: int | None = None) -> Any:
        """Run microbatches forward; the module stays in evaluation mode.

        Returns what `reduce_output` makes of the losses: their mean, or with None a list. Without `compute_loss` the outputs
        of the last stage take the place of the losses, None on other stages. With `return_logits` returns the last
        microbatch's output beside it.
        """
        with published_errors():
            if reduce_output not in ("avg", None):
                raise _NoSuchReduction(f"eval_batch: reduction type {reduce_output} not supported: choose 'avg' or None")
            self.eval()
            loss, outputs = self.evaluate(
                data_iter, compute_loss=compute_loss, keep_outputs=return_logits or not compute_loss,
                reduce_output=reduce_output, bcast_loss=bcast_loss, num_micro_batches=num_micro_batches)
        if not compute_loss and outputs:
            loss = torch.stack(outputs).mean(dim=0) if reduce_output == "avg" else outputs
        return (loss, outputs[-1] if outputs else None) if return_logits else loss

    def set_has_attention_mask(self, value: bool) -> None:
        """Keep `value`; any values may pass between stages."""
        assert isinstance(value, bool), f"set_has_attention_mask: got {value!r}; give True or False"
        self.has_attention_mask = value

    @property
    def grid(self) -> Any:
        """The process groups, of the module's topology; the mesh where the configuration adds axes to it."""
        module = self.module
        if isinstance(module, PipelineModule) and self.mesh.size("tensor") == max(1, module.topology().get_dim("model")):
            return module.mpu()
        return self.mesh

    mpu = grid  # pyright: ignore[reportIncompatibleMethodOverride]  published as the grid

    @property
    def is_pipe_parallel(self) -> bool:
        """Whether there are several stages."""
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        """Whether there are several data ranks."""
        return self.dp_world_size > 1

    @property
    def is_model_parallel(self) -> bool:
        """Whether there are several tensor ranks."""
        return self.mesh.size("tensor") > 1

    @property
    def prev_stage(self) -> int:
        """The stage before this one, -1 before the first."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """The stage after this one, the number of stages after the last."""
        return self.stage_id + 1

    @property
    def micro_batch_size(self) -> int:
        """Samples of a microbatch."""
        return self.train_micro_batch_size_per_gpu()

    @property
    def num_pipe_buffers(self) -> int:
        """The microbatches that the published training schedule has in flight on this stage."""
        return TrainSchedule(self.micro_batches, self.num_stages, self.stage_id).num_pipe_buffers()


DeepSpeedEngine.register(PipelineEngine)
