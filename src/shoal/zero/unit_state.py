"""The phases of a unit, the legal transitions, the holds, and the counters of writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Protocol

from torch import nn
from torch.autograd.graph import increment_version

__all__ = ["TRANSITIONS", "Hold", "Member", "PendingStep", "Phase", "Scope", "VersionCounters"]


class Phase(Enum):
    """The content of the memory of a unit's parameters."""

    RELEASED = "no memory"
    LOADING = "this rank's resting weights are on their way"
    IN_FLIGHT = "a collective writes it"
    ROWS_GATHERED = "the rows that the present call looks up"
    GATHERED = "the values"
    LOST = "values of no use: a step failed halfway"
    CONCEALED = "the values, kept for backward: until then a read raises, as if they were released"


TRANSITIONS = frozenset({
    (Phase.RELEASED, Phase.LOADING),  # fetch
    (Phase.LOADING, Phase.IN_FLIGHT),  # prefetch: the all-gather starts
    (Phase.LOADING, Phase.GATHERED),  # gather, where this rank holds the whole
    (Phase.LOADING, Phase.ROWS_GATHERED),  # gather_rows
    (Phase.LOADING, Phase.RELEASED),  # release of a fetch that was not used
    (Phase.IN_FLIGHT, Phase.GATHERED),  # gather waits
    (Phase.ROWS_GATHERED, Phase.RELEASED),
    (Phase.GATHERED, Phase.IN_FLIGHT),  # publish, where weights rest replicated
    (Phase.GATHERED, Phase.RELEASED),
    (Phase.GATHERED, Phase.CONCEALED),  # conceal, where a forward ends
    (Phase.CONCEALED, Phase.GATHERED),  # gather
    (Phase.CONCEALED, Phase.RELEASED),
    *((phase, Phase.LOST) for phase in Phase),  # invalidate; a lost unit stays lost
})


class Hold(Flag):
    """Why a unit stays gathered."""

    NONE = 0
    CONTEXT = auto()
    """A `gathered` context has it."""
    FOREIGN_READ = auto()
    """Code outside its own module read it: until the pass ends."""
    REUSE = auto()
    """The window expects its next use soon."""
    DETACHED = auto()
    """The engine is destroyed, and the parameters are plain ones."""


class Scope:
    """Whether a read of a released parameter may gather it: in a pass, where all ranks do the same."""

    def __init__(self) -> None:
        self._passes: set[object] = set()

    @property
    def is_open(self) -> bool:
        return bool(self._passes)

    def open(self, owner: object) -> None:
        """Begin a pass of `owner`, which may run within another's."""
        self._passes.add(owner)

    def close(self, owner: object) -> None:
        """End the pass of `owner`, if it runs one."""
        self._passes.discard(owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter of a unit, under its name in the model, with the index of its optimizer group."""

    name: str
    parameter: nn.Parameter
    group: int = 0


class PendingStep(Protocol):
    """A step that is decided and that the unit's weights do not show yet. The unit asks before its memory is used.

    `optim` implements it, a layer above this one that `zero` does not import.
    """

    @property
    def is_taken(self) -> bool:
        """Whether the weights show it."""
        ...

    @property
    def in_backward(self) -> bool:
        """Whether backward began it: the weights may not be used before `engine.step()` ends it."""
        ...

    def request(self) -> None:
        """Note that the next pass uses the unit: a step that is not taken yet leaves the weights in memory."""
        ...

    def finish(self) -> None:
        """Wait until the step is taken. Raises `TierError` if it cannot be."""
        ...


class VersionCounters:
    """Counts writes into the `parameters` of a unit, slot by slot.

    Autograd counts the in-place writes that it sees. A step, a load or an edit changes values without it, and is marked:
    autograd then refuses tensors that it saved before, and writes by scripts are still told from the library's own.
    """

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
