"""What autograd keeps of tensors between forward and backward, where it has to ask for them.

Weights are named, and gathered when they are asked for. Of all others it no longer looks for later writes, as it does of
tensors that it keeps by itself; so that is done here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.zero.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """Another tensor, apart from its node: a node that held itself through its result would never be freed."""

    tensor: Tensor
    version: int

    def unchanged(self) -> Tensor:
        """Return the tensor; raises `UsageError` if it was written to since."""
        if self.tensor._version != self.version:
            raise UsageError(f"backward: it needs a tensor of shape {tuple(self.tensor.shape)} and {self.tensor.dtype} that "
                             f"was written to in place after forward had used it; write to a copy (clone()) instead")
        return self.tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight:
    """What autograd keeps of a tensor that lies in a unit's buffer."""

    module: nn.Module
    unit: Unit
    tensor: Tensor
