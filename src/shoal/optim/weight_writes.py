"""Writes of scripts into 16-bit weights after `initialize`: their fp32 masters follow at the next step.

A step computes masters and overwrites the weights, which are copies of them at stages 0 to 2. What a script wrote, as
`load_state_dict` or a clipping of weights does, would be lost. Elements that it did not change keep their master.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.log import warn_once
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["WeightWrites"]


class WeightWrites:
    """Finds writes of scripts into weights that are copies of their masters, and takes them over before a step.

    It compares autograd's version counters of the weights at each step.
    """

    def __init__(self, units: Iterable[TrainableUnit]):
        self._versions = {unit: unit.versions.count() for unit in units
                          if unit.has_separate_master and not unit.reshards}

    def take_over(self, *, stepped: bool) -> None:
        """Have the masters follow what was written since the last step; warn if they were `stepped` in backward already."""
        for unit, before in self._versions.items():
            if unit.versions.count() == before:
                continue
            if stepped:
                warn_once(f"the weights of unit '{unit.name}' were written into since the last step, and backward has "
                          f"stepped its masters, which do not know of it: it is lost. Write within "
                          f"shoal.gathered(model, modifier_rank=0), or set offload_optimizer.step_in_backward to false")
            else:
                unit.keep_slots(range(len(unit.members)))
            self._versions[unit] = unit.versions.count()
