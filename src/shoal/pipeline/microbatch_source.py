"""The microbatches of a step: the ranks of the first and the last stage draw the same samples from their data iterators.

The first stage uses the inputs and the last one the labels, on every tensor rank; each draws both, so that ranks can compare
them. Without the comparison, iterators that differ between ranks of one data rank would train on inputs with the labels of
other samples, and the loss would not show it.

Ranks exchange a few words at each call, and whole objects only where the words differ. They compare the values of samples at
the first call of each kind, or at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor

from shoal.errors import DataEnded, RanksDisagree, UsageError
from shoal.log import warn_once
from shoal.transport.collectives import Communicator
from shoal.transport.failure_board import FailureBoard
from shoal.tree import Fingerprint, fingerprint_of

__all__ = ["MicrobatchSource"]

Microbatches = list[tuple[Any, Any]]
"""(inputs, labels) of each microbatch of a step."""

_FIX = ("the ranks of the first and the last stage, and all their tensor ranks, draw the same samples, in one order: seed "
        "the loader by the data rank, engine.mesh.rank('data'), or give training_data to initialize")


class MicrobatchSource:
    """Draws the microbatches of each call, on which the ranks of `world` agree before a pass begins."""

    def __init__(self, world: Communicator, failure_board: FailureBoard, *, coordinates: tuple[int, ...],
                 has_first_stage: bool, has_last_stage: bool, label: str, compare_values: bool):
        """With `compare_values`, values of samples are compared at each call, otherwise at the first of each kind.

        `coordinates` are those of `DrawnMicrobatches`; `label` names this rank and its stages in errors.
        """
        self._world = world
        self._board = failure_board
        self._coordinates = coordinates
        self._has_first_stage = has_first_stage
        self._draws = has_first_stage or has_last_stage
        self._label = label
        self._compare_values = compare_values
        self._compared: set[str] = set()

    def draw(self, data: Callable[[], object], count: int, call: str, *, steps: int,
             change: Callable[[Any], Any] | None) -> Microbatches:
        """Return `count` microbatches from the iterator that `data` returns; none on a rank without the first or last stage.

        `call` describes the call, by its name first; `steps` were taken before it; `change` is applied to each item.
        Raises on all ranks if one cannot draw, or if ranks differ in the call or the samples: `DataEnded` if all failing
        iterators have ended, else `UsageError`, or `RanksDisagree`.
        """
        name, items, problem, ended = call.partition(" ")[0], Microbatches(), "", False
        try:
            if self._draws:
                items = _draw(data(), count, f"{name}, step {steps + 1}", change)
        except Exception as error:
            problem, ended = str(error) or type(error).__name__, isinstance(error, DataEnded)
        except BaseException as error:  # an interrupt, or the end of the program
            rank = self._world.rank
            self._board.publish(f"rank {rank}: {call}: the iterator ended the program: {type(error).__name__}")
            raise
        values = name not in self._compared or self._compare_values
        drawn = DrawnMicrobatches.of(items, coordinates=self._coordinates, values=values, label=self._label,
                                     has_first_stage=self._has_first_stage)
        self._world.note_step(steps)
        words = torch.tensor([_digest(call), bool(problem) or values, *drawn.digests()], dtype=torch.int64,
                             device=self._world.words_device)
        if not _agree(self._world.gather_words(words, "the call and its samples")):
            self._compare(call, problem, drawn, ended=ended)
            self._compared.add(name)
        return items

    def _compare(self, call: str, problem: str, drawn: DrawnMicrobatches, *, ended: bool) -> None:
        """Raise on all ranks unless all make one `call`, none has a `problem`, and all drew the same samples."""
        by_rank = self._world.gather_objects((call, problem, ended, drawn))
        first = by_rank[0][0]
        for rank, (other, *_) in enumerate(by_rank):
            if other != first:
                raise RanksDisagree(f"ranks call different things: rank 0 is in {first}, rank {rank} in {other}; let "
                                    f"every rank make the same calls, in one order")
        problems = [(text, end) for _, text, end, _ in by_rank]
        if any(text for text, _ in problems):
            kind = DataEnded if all(end for text, end in problems if text) else UsageError
            raise kind(_join_by_rank([text for text, _ in problems]))
        _require_equal_samples([each for *_, each in by_rank], call.partition(" ")[0])


def _agree(rows: Tensor) -> bool:
    """Whether all ranks make one call, none asks for the exchange of objects, and samples have one shape on all ranks that
    share a data rank.
    """
    first, *_ = lines = rows.tolist()
    seen: dict[tuple[int, ...], int] = {}
    shapes = [(place, shape) for *_, samples, inputs, labels in lines
              for place, shape in (((samples, 0), inputs), ((samples, 1), labels)) if shape]
    return (all(call == first[0] and not details for call, details, *_ in lines)
            and all(seen.setdefault(place, shape) == shape for place, shape in shapes))


def _join_by_rank(texts: list[str]) -> str:
    """Join the messages of ranks, each once with the ranks that it comes from."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}: {text}" for text, of in ranks.items() if text)


def _draw(data: object, count: int, call: str, change: Callable[[Any], Any] | None) -> Microbatches:
    """Return `count` microbatches (inputs, labels) of an iterator, with `change` applied to each item.

    `call` names the caller in errors. Raises `DataEnded` for an iterator that ends early, `UsageError` for an object that is
    no iterator, an iterator that fails, and items that are not pairs.
    """
    if not isinstance(data, Iterator):
        raise UsageError(f"{call}: got a {type(data).__name__}, which would start anew at every step; pass an iterator: "
                         f"call iter(...) on it once before the loop, or on shoal.RepeatingLoader(...)")
    try:
        found = [change(item) if change is not None else item for item in islice(cast("Iterator[Any]", data), count)]
    except Exception as error:
        raise UsageError(f"{call}: the iterator failed: {type(error).__name__}: {error}") from error
    if len(found) < count:
        raise DataEnded(f"{call}: the iterator ended after {len(found)} of {count} microbatches; give it a multiple of "
                         f"{count}, or wrap the loader in shoal.RepeatingLoader")
    for item in found:
        parts = cast("Sequence[Any]", item) if isinstance(item, tuple | list) else ()
        if len(parts) != 2:
            got = f"{type(item).__name__} of {len(parts)}" if isinstance(item, tuple | list) else type(item).__name__
            raise UsageError(f"{call}: the iterator gave a {got}; each item is (inputs, labels): change the loader's "
                             f"collate_fn, or call engine.set_batch_fn")
    return [(item[0], item[1]) for item in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnMicrobatches:
    """Fingerprints of the microbatches that a rank drew, to compare with other ranks."""

    coordinates: tuple[int, ...]
    """The rank's coordinates on the data and sequence axes; ranks with equal ones draw the same samples."""
    label: str
    """The rank and its stages, for errors."""
    has_first_stage: bool
    """Whether the rank has the first stage, which uses the inputs."""
    inputs: list[Fingerprint]
    labels: list[Fingerprint]

    @classmethod
    def of(cls, items: Sequence[tuple[Any, Any]], *, coordinates: tuple[int, ...], label: str, has_first_stage: bool,
           values: bool) -> DrawnMicrobatches:
        """Fingerprint microbatches: shapes and dtypes, and with `values` their contents."""
        return cls(coordinates=coordinates, label=label, has_first_stage=has_first_stage,
                   inputs=[fingerprint_of(inputs, values=values) for inputs, _ in items],
                   labels=[fingerprint_of(labels, values=values) for _, labels in items])

    def digests(self) -> tuple[int, int, int]:
        """Return three hashes: of the coordinates, of the shapes of the inputs, and of the labels' (0 without tensors)."""
        return _digest(self.coordinates), _shapes(self.inputs), _shapes(self.labels)


def _digest(value: object) -> int:
    """Return a hash of `repr(value)` that is the same on every rank."""
    return crc32(repr(value).encode())


def _shapes(values: Sequence[Fingerprint]) -> int:
    shapes = [(value.shapes, value.dtypes) for value in values]
    return _digest(shapes) if any(each for each, _ in shapes) else 0


def _require_equal_samples(by_rank: Sequence[DrawnMicrobatches], call: str) -> None:
    """Raise `RanksDisagree`, on every rank, if two ranks with equal coordinates drew different samples.

    Items without tensors are not compared, so a rank may omit the part that it does not use. If inputs differ and labels
    do not, they may be the same samples under random augmentation, of which the last stage uses only the labels: that case
    is a warning.
    """
    known: dict[tuple[int, ...], DrawnMicrobatches] = {}
    for drawn in (each for each in by_rank if each.inputs):
        other = known.setdefault(drawn.coordinates, drawn)
        for number in range(min(len(drawn.inputs), len(other.inputs))):
            pairs = {"labels": (other.labels[number], drawn.labels[number]),
                     "inputs": (other.inputs[number], drawn.inputs[number])}
            comparable = {part: pair for part, pair in pairs.items() if all(each.shapes for each in pair)}
            for part, (one, two) in sorted(comparable.items()):
                if (one.shapes, one.dtypes) != (two.shapes, two.dtypes):
                    raise RanksDisagree(f"{call}: microbatch {number}: {other.label} drew {part} of {one}, {drawn.label} of "
                                        f"{two}; {_FIX}")
            differ = [part for part, (one, two) in comparable.items() if one.bits != two.bits]
            if "labels" in differ or (differ and drawn.has_first_stage and other.has_first_stage):
                raise RanksDisagree(f"{call}: microbatch {number}: {other.label} and {drawn.label} drew {differ[0]} of one "
                                    f"shape ({comparable[differ[0]][0]}) and other values; {_FIX}")
            if differ and "labels" in comparable:
                warn_once(f"{call}: {other.label} and {drawn.label} drew the same labels with other inputs; that is right "
                          f"only if they are the same samples under random augmentation. Otherwise {_FIX}")
