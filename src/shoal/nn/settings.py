"""The `kernels` section: the library whose kernels compute the products of linear layers.

    {"kernels": {"linear": "auto"}}
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from shoal.config.section import Section, any_case

__all__ = ["KernelSettings"]

_Linear = Annotated[Literal["auto", "torch", "onednn"], BeforeValidator(any_case("auto", "torch", "onednn"))]


class KernelSettings(Section):
    """Kernels that compute torch's layers. (Shoal only.)"""

    linear: _Linear = "torch"
    """The matrix products of every `nn.Linear` in fp32 on the host: torch's own; oneDNN's; or auto: for each product the
    faster one, which a probe finds once per machine. Values differ by the order of sums."""
