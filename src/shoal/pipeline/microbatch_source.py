"""The microbatches of a step: the ranks of the first and the last stage draw the same samples from their data iterators.

The first stage uses the inputs and the last one the labels, on every tensor rank; each draws both, so that ranks can compare
them. Without the comparison, iterators that differ between ranks of one data rank would train on inputs with the labels of
other samples, and the loss would not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast
from zlib import crc32

from shoal.errors import DataEnded, RanksDisagree, UsageError
from shoal.log import warn_once
from shoal.tree import Fingerprint, fingerprint_of

__all__ = ["DrawnMicrobatches", "digest", "draw", "require_equal_samples"]

_FIX = ("the ranks of the first and the last stage, and all their tensor ranks, draw the same samples, in one order: seed "
        "the loader by the data rank, engine.mesh.rank('data'), or give training_data to initialize")


def draw(data: object, count: int, call: str, change: Callable[[Any], Any] | None) -> list[tuple[Any, Any]]:
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
        return digest(self.coordinates), _shapes(self.inputs), _shapes(self.labels)


def digest(value: object) -> int:
    """Return a hash of `repr(value)` that is the same on every rank."""
    return crc32(repr(value).encode())


def _shapes(values: Sequence[Fingerprint]) -> int:
    shapes = [(value.shapes, value.dtypes) for value in values]
    return digest(shapes) if any(each for each, _ in shapes) else 0


def require_equal_samples(by_rank: Sequence[DrawnMicrobatches], call: str) -> None:
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
