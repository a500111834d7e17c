"""The configuration of dtypes and of the loss scale: `fp16`, `bf16` and `data_types`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from shoal.config.published import Published, inert, later
from shoal.config.section import Conflict, Count, Dtype, Number, Positive, Section, Switch

__all__ = ["Bf16Settings", "DataTypes", "Fp16Settings"]


class Fp16Settings(Section):
    """fp16 training with fp32 masters and a loss scale."""

    enabled: Switch = False
    """Compute in fp16, keep fp32 masters, and scale the loss."""

    auto_cast: Switch = False
    """Cast floating-point inputs of the model to fp16."""

    loss_scale: Annotated[Number, Field(ge=0)] = 0.0
    """The static loss scale; 0 selects a dynamic loss scale."""

    initial_scale_power: Annotated[Count, Field(le=127)] = 16
    """The initial dynamic loss scale is 2 to this power."""

    loss_scale_window: Positive = 1000
    """Steps without overflow after which the next one doubles the dynamic loss scale."""

    hysteresis: Positive = 2
    """Overflows until the dynamic loss scale halves; the first `hysteresis - 1` overflows only skip their step."""

    consecutive_hysteresis: Switch = False
    """Reset `hysteresis` at every step without overflow, so that only consecutive overflows count."""

    min_loss_scale: Annotated[Number, Field(gt=0)] = 1.0
    """The minimum dynamic loss scale; an overflow at this scale raises LossScaleError."""

    published: ClassVar[Mapping[str, Published]] = {
        "fp16_master_weights_and_grads": later("masters and gradients in fp16, without an fp32 copy", False),
    }

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.loss_scale == 0

    @property
    def initial_scale(self) -> float:
        """The loss scale of the first step."""
        return 2.0**self.initial_scale_power if self.dynamic else self.loss_scale

    def conflicts(self) -> Iterable[Conflict]:
        if self.dynamic and self.min_loss_scale > self.initial_scale:
            yield Conflict(
                keys=("min_loss_scale", "initial_scale_power", "loss_scale"),
                message=f"got {self.min_loss_scale:g}, above the first scale 2^{self.initial_scale_power}; "
                "lower it or raise initial_scale_power",
            )


class Bf16Settings(Section):
    """bf16 training with fp32 masters; bf16 has the range of fp32, so it needs no loss scale."""

    enabled: Switch = False
    """Compute in bf16 and keep fp32 masters."""

    check_grad_overflow: Switch = True
    """Skip a step whose gradients contain an infinity or NaN."""

    published: ClassVar[Mapping[str, Published]] = {
        "immediate_grad_update": inert(
            "add each gradient to its accumulator as soon as it is ready",
            False,
            True,
            reason="gradients are always added as soon as they are ready",
        ),
        "bf16_master_weights_and_grads": later("masters and gradients in bf16, without an fp32 copy", False),
        "bf16_optimizer_states": later("moments in bf16", False),
    }


class DataTypes(Section):
    """Dtypes other than the compute dtype."""

    grad_accum_dtype: Dtype | None = None
    """The dtype in which gradients are accumulated over microbatches; null: the compute dtype."""

    published: ClassVar[Mapping[str, Published]] = {
        "param_dtype": later("another dtype for the parameters"),
        "buffer_dtype": later("another dtype for buffers"),
        "keep_in_fp32_modules": later("modules whose buffers stay in fp32", "auto"),
    }
