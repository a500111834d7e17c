"""What autograd keeps of tensors between forward and backward, where it has to ask for them.

Weights are named, and gathered when they are asked for. Of what it is handed back autograd no longer looks for later writes,
as it does of tensors that it keeps by itself; so that is done here. A step, and whoever else puts other values in place of
weights, counts as a write, here as in plain training: `Unit.mark`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.zero.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """A tensor as it was when autograd saved it; apart from its node, for one that held itself would never be freed."""

    tensor: Tensor
    version: int
    unit: Unit
    """In whose module's forward that was."""

    @property
    def _what(self) -> tuple[str, str]:
        what = f"a tensor of shape {tuple(self.tensor.shape)} and {self.tensor.dtype}, saved in the forward around unit"
        return f"{what} '{self.unit.name}',", "write to a copy (clone()) instead"

    def unchanged(self) -> Tensor:
        """Return the tensor; raises `UsageError` if it was written to since."""
        if self.tensor._version != self.version:
            what, instead = self._what
            raise UsageError(f"rank {self.unit.communicator.rank}: backward needs {what} that was written to in place after "
                             f"forward had used it; {instead}")
        return self.tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight(Saved):
    """One that lies in the buffer of its unit."""

    module: nn.Module
    """Around the unit."""

    @property
    def _what(self) -> tuple[str, str]:
        at = self.tensor.storage_offset()
        name = next((slot.name for slot in reversed(self.unit.layout.slots) if slot.start <= at), self.unit.name)
        return f"the weights '{name}',", "call engine.step(), load or write after the backward of every forward before it"
