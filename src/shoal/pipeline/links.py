"""What the stages of one rank exchange with the stages before and behind them.

    activations   out of stage s, into stage s+1
    gradients     out of stage s+1, into stage s: of the activations that want one, in their order

Between stages of two ranks this is a channel with threads at its ends; between stages of one rank a value is put on a shelf.
Either way what arrives are leaves: autograd ends at the border of a stage.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shoal.errors import CollectiveFailed
from shoal.pipeline.channel import Receiver, Sender
from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.stage_io import detached

__all__ = ["Edge", "Links"]

ACTIVATIONS, GRADIENTS = "activations", "gradients"


class Edge(NamedTuple):
    """What goes into a stage, of one of two kinds."""

    kind: str
    stage: int

    @property
    def number(self) -> int:
        """A number that no other edge of the pipeline has."""
        return 2 * self.stage + (self.kind == GRADIENTS)

    def __str__(self) -> str:
        return f"{self.kind} into stage {self.stage}"


class StageInput(Protocol):
    """An end that values come out of."""

    def expect(self, count: int) -> None: ...
    def receive(self) -> object: ...
    def close(self) -> None: ...


class StageOutput(Protocol):
    """An end that values go into."""

    def expect(self, count: int) -> None: ...
    def send(self, value: object) -> None: ...
    def flush(self) -> None: ...
    def abort(self, message: str) -> None: ...
    def close(self) -> None: ...


class Links:
    """The ends that this rank's stages hold, by edge."""

    def __init__(self, owner: tuple[int, ...], rank: int, connect: Connect):
        self._owner = owner
        self._connect = connect
        self._sources: dict[Edge, StageInput] = {}
        self._sinks: dict[Edge, StageOutput] = {}
        self._begun = _Announced(row=(), outputs={}, inputs={}, later={})
        self._later: Mapping[Edge, int] = {}
        for edge, giver in _edges(len(owner)):
            ends = owner[giver], owner[edge.stage]
            if ends == (rank, rank):
                self._sources[edge] = self._sinks[edge] = _LocalLink(str(edge))
            elif rank == ends[0]:
                self._sinks[edge] = connect.sender(edge, ends[1])
            elif rank == ends[1]:
                self._sources[edge] = connect.receiver(edge, ends[0])

    def begin(self, row: tuple[Instruction, ...]) -> None:
        """Announce what the instructions of `row` will ask for, and what they will give."""
        if self._begun.row is not row:  # the same from step to step
            self._begun = self._announced(row)
        for edge, count in self._begun.outputs.items():
            self._sinks[edge].expect(count)
        self._expect(self._begun.inputs)
        self._later = self._begun.later

    def _announced(self, row: tuple[Instruction, ...]) -> _Announced:
        first = next((place for place, each in enumerate(row) if self.outputs(each)), len(row))
        inputs = Counter(edge for each in row for edge in self.inputs(each))
        at_once = {edge for each in row[:first + 1] for edge in self.inputs(each)} | self._sinks.keys()  # shelves
        return _Announced(row=row, outputs=Counter(edge for each in row for edge in self.outputs(each)),
                          inputs={edge: count for edge, count in inputs.items() if edge in at_once},
                          later={edge: count for edge, count in inputs.items() if edge not in at_once})

    def _expect(self, counts: Mapping[Edge, int]) -> None:
        for edge, count in counts.items():
            self._sources[edge].expect(count)

    def inputs(self, instruction: Instruction) -> list[Edge]:
        """Return the edge that `instruction` takes a value from, if it does."""
        stage, last = instruction.stage, len(self._owner) - 1
        match instruction.kind:
            case Op.FORWARD:
                return [Edge(ACTIVATIONS, stage)] if stage else []
            case Op.BACKWARD | Op.INPUT:
                return [Edge(GRADIENTS, stage)] if stage < last else []
            case Op.WEIGHT:
                return []

    def outputs(self, instruction: Instruction) -> list[Edge]:
        """Return the edge that `instruction` gives a value to, if it does."""
        stage, last = instruction.stage, len(self._owner) - 1
        match instruction.kind:
            case Op.FORWARD:
                return [Edge(ACTIVATIONS, stage + 1)] if stage < last else []
            case Op.BACKWARD | Op.INPUT:
                return [Edge(GRADIENTS, stage - 1)] if stage else []
            case Op.WEIGHT:
                return []

    def receive(self, kind: str, stage: int) -> object:
        """Return the next of what goes into `stage`."""
        return self._sources[Edge(kind, stage)].receive()

    def send(self, kind: str, stage: int, value: object) -> None:
        """Let `value` go into `stage`."""
        self._sinks[Edge(kind, stage)].send(value)
        if self._later:
            self._expect(self._later)
            self._later = {}

    def flush(self) -> None:
        """Wait until everything is sent."""
        for sink in self._sinks.values():
            sink.flush()

    def abort(self, message: str) -> None:
        """Let every neighbour know that no more will come, and why, as far as it can be reached."""
        for sink in self._sinks.values():
            with suppress(CollectiveFailed):
                sink.abort(message)

    def end_waits(self) -> None:
        """End whatever waits for other ranks of the pipeline, for good."""
        self._connect.end_waits()

    def close(self) -> None:
        for end in (*self._sinks.values(), *self._sources.values()):
            end.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Announced:
    """How many values the instructions of a row give to each edge, and take from it."""

    row: tuple[Instruction, ...]
    outputs: Mapping[Edge, int]
    inputs: Mapping[Edge, int]
    """Those that are taken before anything is given."""
    later: Mapping[Edge, int]
    """The others: the first value that somebody waits for goes out before room is made for them."""


class Connect(Protocol):
    """Opens the ends of an edge to another rank of the pipeline."""

    def sender(self, edge: Edge, peer: int) -> Sender: ...
    def receiver(self, edge: Edge, peer: int) -> Receiver: ...
    def end_waits(self) -> None: ...


class _LocalLink:
    """Both ends of an edge within a rank."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._values: deque[object] = deque()

    def expect(self, count: int) -> None:
        self._values.clear()  # of a step that an error ended

    def send(self, value: object) -> None:
        self._values.append(detached(value, self._what))

    def receive(self) -> object:
        return self._values.popleft()

    def flush(self) -> None: ...

    def abort(self, message: str) -> None: ...

    def close(self) -> None: ...


def _edges(stages: int) -> Iterable[tuple[Edge, int]]:
    """Yield every edge of a pipeline and the stage that it comes from."""
    for stage in range(1, stages):
        yield Edge(ACTIVATIONS, stage), stage - 1
        yield Edge(GRADIENTS, stage - 1), stage
