"""Writes into the parameters of a unit, by autograd's version counters.

Autograd counts the in-place writes that it sees. A step, a load or an edit changes values without it, and is marked:
autograd then refuses tensors that it saved before, and writes by scripts are still told from the library's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.autograd.graph import increment_version


class VersionCounters:
    """Counts writes into `parameters`, slot by slot."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters
        self._marks = [0 for _ in parameters]
        self._seen = self.count()

    def count(self) -> list[int]:
        """Return for each slot the number of writes by scripts that autograd has seen."""
        return [parameter._version - own for parameter, own in zip(self._parameters, self._marks, strict=True)]

    def mark(self, slots: Iterable[int]) -> None:
        """Let autograd know that the library wrote into `slots`."""
        for slot in slots:
            increment_version(self._parameters[slot])
            self._marks[slot] += 1

    def see(self) -> None:
        """Start watching for writes by scripts."""
        self._seen = self.count()

    @property
    def since(self) -> list[bool]:
        """For each slot, whether a script has written there since `see`."""
        return [now != before for now, before in zip(self.count(), self._seen, strict=True)]
