"""Who has written into the parameters of a unit, by the versions that autograd counts.

Autograd counts what it sees written in place. What puts other values there without it, a step, a load, a modifier, is
marked: then what autograd has saved of these parameters is told apart, and what others wrote is still known from what we
did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.autograd.graph import increment_version


class VersionCounters:
    """The writes into `parameters`, slot by slot."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters
        self._marks = [0 for _ in parameters]
        self._seen = self.count()

    def count(self) -> list[int]:
        """Return for each slot a number that grows with every write of somebody else's that autograd can see."""
        return [parameter._version - own for parameter, own in zip(self._parameters, self._marks, strict=True)]

    def mark(self, slots: Iterable[int]) -> None:
        """Let autograd know that `slots` hold other values than before."""
        for slot in slots:
            increment_version(self._parameters[slot])
            self._marks[slot] += 1

    def see(self) -> None:
        """Begin to watch."""
        self._seen = self.count()

    @property
    def since(self) -> list[bool]:
        """For each slot, whether somebody has written there since `see`."""
        return [now != before for now, before in zip(self.count(), self._seen, strict=True)]
