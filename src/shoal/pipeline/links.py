"""Links connect the stages of this rank to the stages before and after them.

    activations   from stage s to stage s+1
    gradients     from stage s+1 to stage s: one for each activation that requires a gradient, in their order

Stages on different ranks exchange values over a channel, stages of one rank over an in-process queue. Either way the
received tensors are leaves, so autograd ends at the boundary of a stage.

The channels of two engines never mix. Where gloo carries the device's tensors, all edges share the pipeline axis' group, and
each channel has its own number there. NCCL has no tags, so there each edge has its own group; its headers still go by gloo.
So no rank occupies the device with a wait for a message that may not come: NCCL only receives tensors whose header arrived.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shoal.errors import CollectiveFailed
from shoal.mesh.mesh import Mesh
from shoal.pipeline.channel import Receiver, Sender
from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.value_tree import detached
from shoal.transport import process_group
from shoal.transport.failure_board import abort_waits

__all__ = ["ACTIVATIONS", "GRADIENTS", "Connector", "Edge", "Links"]

ACTIVATIONS, GRADIENTS = "activations", "gradients"


class Edge(NamedTuple):
    """The input of a stage of one kind: its activations, or its gradients."""

    kind: str
    stage: int

    @property
    def number(self) -> int:
        """A number unique among the edges of the pipeline."""
        return 2 * self.stage + (self.kind == GRADIENTS)

    def __str__(self) -> str:
        return f"{self.kind} into stage {self.stage}"


class StageInput(Protocol):
    """The receiving end of an edge."""

    def expect(self, count: int) -> None: ...
    def receive(self) -> object: ...
    def close(self) -> None: ...


class StageOutput(Protocol):
    """The sending end of an edge."""

    def expect(self, count: int) -> None: ...
    def send(self, value: object) -> None: ...
    def flush(self) -> None: ...
    def abort(self, message: str) -> None: ...
    def close(self) -> None: ...


class Links:
    """The ends of all edges at this rank's stages."""

    def __init__(self, owner: tuple[int, ...], rank: int, connector: Connector):
        self._owner = owner
        self._connector = connector
        self._sources: dict[Edge, StageInput] = {}
        self._sinks: dict[Edge, StageOutput] = {}
        self._counts = _MessageCounts(row=(), outputs={}, early_inputs={}, late_inputs={})
        self._late_inputs: Mapping[Edge, int] = {}
        for edge, source_stage in _edges(len(owner)):
            ranks = owner[source_stage], owner[edge.stage]
            if ranks == (rank, rank):
                self._sources[edge] = self._sinks[edge] = _LocalLink(str(edge))
            elif rank == ranks[0]:
                self._sinks[edge] = connector.sender(edge, ranks[1])
            elif rank == ranks[1]:
                self._sources[edge] = connector.receiver(edge, ranks[0])

    def begin(self, row: tuple[Instruction, ...]) -> None:
        """Announce to every edge how many values the instructions of `row` send and receive."""
        if self._counts.row is not row:  # the same object from step to step
            self._counts = self._count_messages(row)
        for edge, count in self._counts.outputs.items():
            self._sinks[edge].expect(count)
        self._expect(self._counts.early_inputs)
        self._late_inputs = self._counts.late_inputs

    def _count_messages(self, row: tuple[Instruction, ...]) -> _MessageCounts:
        first = next((place for place, each in enumerate(row) if self.output_edges(each)), len(row))
        inputs = Counter(edge for each in row for edge in self.input_edges(each))
        early = {edge for each in row[:first + 1] for edge in self.input_edges(each)} | self._sinks.keys()  # local links
        return _MessageCounts(row=row, outputs=Counter(edge for each in row for edge in self.output_edges(each)),
                              early_inputs={edge: count for edge, count in inputs.items() if edge in early},
                              late_inputs={edge: count for edge, count in inputs.items() if edge not in early})

    def _expect(self, counts: Mapping[Edge, int]) -> None:
        for edge, count in counts.items():
            self._sources[edge].expect(count)

    def input_edges(self, instruction: Instruction) -> list[Edge]:
        """Return the edge from which `instruction` receives, if it does."""
        stage, last = instruction.stage, len(self._owner) - 1
        match instruction.kind:
            case Op.FORWARD:
                return [Edge(ACTIVATIONS, stage)] if stage else []
            case Op.BACKWARD | Op.INPUT:
                return [Edge(GRADIENTS, stage)] if stage < last else []
            case Op.WEIGHT:
                return []

    def output_edges(self, instruction: Instruction) -> list[Edge]:
        """Return the edge to which `instruction` sends, if it does."""
        stage, last = instruction.stage, len(self._owner) - 1
        match instruction.kind:
            case Op.FORWARD:
                return [Edge(ACTIVATIONS, stage + 1)] if stage < last else []
            case Op.BACKWARD | Op.INPUT:
                return [Edge(GRADIENTS, stage - 1)] if stage else []
            case Op.WEIGHT:
                return []

    def receive(self, kind: str, stage: int) -> object:
        """Return the next value of `kind` for `stage`."""
        return self._sources[Edge(kind, stage)].receive()

    def send(self, kind: str, stage: int, value: object) -> None:
        """Send `value` to `stage` as its next input of `kind`."""
        self._sinks[Edge(kind, stage)].send(value)
        if self._late_inputs:
            self._expect(self._late_inputs)
            self._late_inputs = {}

    def flush(self) -> None:
        """Return when all values are sent."""
        for sink in self._sinks.values():
            sink.flush()

    def abort(self, message: str) -> None:
        """Tell every reachable neighbour that no more values will come, and why."""
        for sink in self._sinks.values():
            with suppress(CollectiveFailed):
                sink.abort(message)

    def end_waits(self) -> None:
        """End all waits for other ranks of the pipeline, for good."""
        self._connector.end_waits()

    def close(self) -> None:
        for end in (*self._sinks.values(), *self._sources.values()):
            end.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageCounts:
    """How many values the instructions of a row send to each edge, and receive from it."""

    row: tuple[Instruction, ...]
    outputs: Mapping[Edge, int]
    early_inputs: Mapping[Edge, int]
    """Edges that the row receives from before its first send; announced when the row begins."""
    late_inputs: Mapping[Edge, int]
    """The other edges; announced after the first send, so that posting their receives does not delay it."""


class _LocalLink:
    """Both ends of an edge between two stages of one rank."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._values: deque[object] = deque()

    def expect(self, count: int) -> None:
        self._values.clear()  # values of a step that an error ended

    def send(self, value: object) -> None:
        self._values.append(detached(value, self._name))

    def receive(self) -> object:
        return self._values.popleft()

    def flush(self) -> None: ...

    def abort(self, message: str) -> None: ...

    def close(self) -> None: ...


def _edges(stages: int) -> Iterable[tuple[Edge, int]]:
    """Yield every edge of a pipeline and the stage that sends on it."""
    for stage in range(1, stages):
        yield Edge(ACTIVATIONS, stage), stage - 1
        yield Edge(GRADIENTS, stage - 1), stage


# Channels to other ranks

_channel_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""The number of channels opened in each group, over all its engines."""


class Connector:
    """Opens the channels of one pipeline over the pipeline axis of a mesh."""

    def __init__(self, mesh: Mesh, stages: int, device: torch.device, timeout: float):
        self._group = mesh.group("pipeline")
        self._device = device
        self._timeout = timeout
        self._first = _channel_counts.get(self._group, 0)
        _channel_counts[self._group] = self._first + 2 * stages
        self._edge_groups: list[dist.ProcessGroup | None] = []
        if (backends := edge_backends(process_group.backends(self._group), device)) is not None:
            self._edge_groups = [process_group.group_of(mesh.lines("pipeline"), backend=backends) for _ in range(2 * stages)]

    def sender(self, edge: Edge, peer: int) -> Sender:
        return Sender(self._group_of(edge), peer, self._first + edge.number, device=self._device, timeout=self._timeout,
                      name=str(edge))

    def receiver(self, edge: Edge, peer: int) -> Receiver:
        return Receiver(self._group_of(edge), peer, self._first + edge.number, device=self._device, timeout=self._timeout,
                        name=str(edge))

    def end_waits(self) -> None:
        """End all waits in the channels."""
        for group in self._edge_groups or [self._group]:
            if group is not None:
                abort_waits(group)

    def _group_of(self, edge: Edge) -> dist.ProcessGroup:
        own = self._edge_groups[edge.number] if self._edge_groups else None
        return own or self._group


def edge_backends(backends: Mapping[str, str], device: torch.device) -> str | None:
    """Return the backends of a group for each edge; None where gloo's tags keep the edges apart in one group.

    `backends` are those of the pipeline axis, by type of device; the edges carry tensors of `device`.
    """
    carrier = backends.get(device.type, "gloo")
    if carrier == "gloo":
        return None
    return "cpu:gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{carrier}"
