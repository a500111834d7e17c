"""What the configuration says, as questions to the engine, under the names that training scripts know.

Each answers with the value in force. A published key that is refused as long as it asks for something has one answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.config.batch import BatchSizes
from shoal.engine.schema import Config
from shoal.errors import UsageError
from shoal.precision.policy import Policy


class Configured(nn.Module):
    """Questions about the configuration."""

    settings: Config
    batch: BatchSizes
    policy: Policy
    client_optimizer: object

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was given, in a dict of its own; `settings` holds it with every default resolved."""
        return self.settings.given

    @property
    def _config(self) -> Config:
        return self.settings

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all data ranks."""
        return self.batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Microbatches per optimizer step."""
        return self.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the batch of a step, of one forward on one rank, and the microbatches of a step."""
        return self.batch.total, self.batch.micro, self.batch.accumulation

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.settings.zero_optimization.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self.settings.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.settings.zero_optimization.stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` may gather the weights at stage 3."""
        return self.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def fp16_enabled(self) -> bool:
        return self.settings.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.settings.bf16.enabled

    def amp_enabled(self) -> bool:
        """Apex is not used: False."""
        return False

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is found while training."""
        return self.settings.fp16.enabled and self.settings.fp16.dynamic

    def gradient_clipping(self) -> float:
        """The largest global norm of the gradients; 0 leaves them alone."""
        return self.settings.gradient_clipping

    def optimizer_name(self) -> str | None:
        """The class of the optimizer that `initialize` was given, or the configured name."""
        if self.client_optimizer is not None and not callable(self.client_optimizer):
            return type(self.client_optimizer).__name__
        return self.settings.optimizer.type

    def scheduler_name(self) -> str | None:
        return self.settings.scheduler.type

    def steps_per_print(self) -> int | None:
        return self.settings.steps_per_print

    def dump_state(self) -> bool:
        return self.settings.dump_state

    def wall_clock_breakdown(self) -> bool:
        """Timers are refused by the configuration: False."""
        return False

    def memory_breakdown(self) -> bool:
        """Memory reports are refused by the configuration: False."""
        return False

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided by the number of ranks, or by a part of it, after they are summed."""
        return not self.policy.averaging.is_before(accumulate=self.policy.accumulate, wire=self.policy.reduce)

    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed: 1, a part of the number of ranks, or all of it."""
        factors = self.policy.averaging.factors(self.batch.data_ranks, accumulate=self.policy.accumulate,
                                                wire=self.policy.reduce)
        return 1 / factors.before

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients travel."""
        return self.policy.reduce

    @communication_data_type.setter
    def communication_data_type(self, dtype: torch.dtype) -> None:
        if dtype != self.policy.reduce:
            raise UsageError(f"communication_data_type: got {dtype}, but the buffers of this engine were made for "
                             f"{self.policy.reduce}; set communication_data_type in the configuration instead")
