"""The settings of the optimizer that `initialize` builds by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from shoal.config.published import Published, inert
from shoal.config.section import Conflict, Section, Text

__all__ = ["OptimizerSettings"]


class OptimizerSettings(Section):
    """The optimizer that `initialize` builds if the caller passes none."""

    type: Text | None = None
    """Adam, AdamW, SGD, Adagrad, Lion, Lamb, OneBitAdam, OneBitLamb or ZeroOneAdam in any case, another registered name, or
    a class of `torch.optim`."""

    params: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    """Keywords of the optimizer's constructor, such as lr, betas, eps and weight_decay."""

    published: ClassVar[Mapping[str, Published]] = {
        "legacy_fusion": inert("the older fused fp16 path", False, reason="there is one path, and it is the fused one"),
    }

    def conflicts(self) -> Iterable[Conflict]:
        if self.type is None and self.params:
            yield Conflict(keys=("type", "params"), message="missing beside params; name an optimizer such as 'AdamW'")
        if "max_grad_norm" in self.params:
            yield Conflict(
                keys=("params.max_grad_norm",),
                message="no optimizer clips by itself; write gradient_clipping at the top level instead",
            )
