"""What a script writes into weights that are copies of their masters is lost at the next step, and not in silence."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shoal.log import warn_once
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["MasterWriteCheck"]


class MasterWriteCheck:
    """The units whose weights rest beside their masters, and the writes into them that autograd has counted."""

    def __init__(self, units: Iterable[TrainableUnit]):
        self._versions = {unit: unit.versions.count() for unit in units
                          if unit.state.weights is not None and not unit.reshards}

    def check(self) -> None:
        """Warn of a unit that was written into since the last time, unless its masters have learned of it."""
        for unit, before in self._versions.items():
            if (now := unit.versions.count()) != before:
                self._versions[unit] = now
                if not _agrees(unit):
                    warn_once(f"the weights of unit '{unit.name}' were written into since the last step, and its masters, "
                              f"which are stepped, do not know of it: it is lost. Load weights before initialize, or write "
                              f"within shoal.gathered(model, modifier_rank=0)")


def _agrees(unit: TrainableUnit) -> bool:
    """Whether this rank's weights are its masters', rounded."""
    if unit.state.granule is not None:  # masters that are not here
        return False
    span, master = unit.master_span, unit.state.master.tensor
    weights = unit.full[span.start:span.stop]
    return torch.equal(weights, master.to(device=weights.device, dtype=weights.dtype))
