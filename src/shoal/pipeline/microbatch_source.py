"""The microbatches of a step: drawn where the first or the last stage is, and the same wherever they are of one data rank.

The first stage uses the inputs and the last one the labels, on every tensor rank; each draws both, so that what a rank uses
can be held against what another drew. Ranks of one data rank whose iterators differ train on samples with the labels of
others, without a sign in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast
from zlib import crc32

from shoal.errors import RanksDisagree, UsageError
from shoal.log import warn_once
from shoal.tree import Fingerprint, fingerprint_of

__all__ = ["MicrobatchSource", "compare", "digest", "draw"]

_FIX = ("the ranks of the first and the last stage, and all their tensor ranks, draw the same samples, in one order: seed "
        "the loader by the data rank, engine.mesh.rank('data'), or give training_data to initialize")


def draw(data: object, count: int, call: str, change: Callable[[Any], Any] | None) -> list[tuple[Any, Any]]:
    """Return `count` microbatches (inputs, labels) of an iterator, each as `change` makes it.

    Raises `UsageError` for what is no iterator, one that ends early or fails, and items of another form.
    """
    if not isinstance(data, Iterator):
        raise UsageError(f"{call}: got a {type(data).__name__}, which would start anew at every step; pass an iterator: "
                         f"iter(...) of it once, before the loop, or of shoal.RepeatingLoader(...)")
    try:
        found = [change(item) if change is not None else item for item in islice(cast("Iterator[Any]", data), count)]
    except Exception as error:
        raise UsageError(f"{call}: the iterator failed: {type(error).__name__}: {error}") from error
    if len(found) < count:
        raise UsageError(f"{call}: the iterator ended after {len(found)} of {count} microbatches; give it a multiple of "
                         f"{count}, or wrap the loader in shoal.RepeatingLoader")
    for item in found:
        parts = cast("Sequence[Any]", item) if isinstance(item, tuple | list) else ()
        if len(parts) != 2:
            got = f"{type(item).__name__} of {len(parts)}" if isinstance(item, tuple | list) else type(item).__name__
            raise UsageError(f"{call}: the iterator gave a {got}; each item is (inputs, labels): change the loader's "
                             f"collate_fn, or call engine.set_batch_fn")
    return [(item[0], item[1]) for item in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchSource:
    """What a rank has drawn, as other ranks hear of it."""

    samples: tuple[int, ...]
    """The coordinates of ranks that see the same samples."""
    stage: str
    """Where it is, in words."""
    first: bool
    """It uses the inputs."""
    inputs: list[Fingerprint]
    labels: list[Fingerprint]

    @classmethod
    def of(cls, items: Sequence[tuple[Any, Any]], *, samples: tuple[int, ...], stage: str, first: bool,
           values: bool) -> MicrobatchSource:
        """Describe microbatches, by their `values` too or by their shapes alone."""
        return cls(samples=samples, stage=stage, first=first,
                   inputs=[fingerprint_of(inputs, values=values) for inputs, _ in items],
                   labels=[fingerprint_of(labels, values=values) for _, labels in items])

    def words(self) -> tuple[int, int, int]:
        """Return whose samples they are, and a number for the shapes of the inputs and of the labels, 0 without tensors."""
        return digest(self.samples), _shapes(self.inputs), _shapes(self.labels)


def digest(value: object) -> int:
    """Return a number that stands for what `value` shows, the same on every rank."""
    return crc32(repr(value).encode())


def _shapes(values: Sequence[Fingerprint]) -> int:
    shown = [(value.shapes, value.dtypes) for value in values]
    return digest(shown) if any(shapes for shapes, _ in shown) else 0


def compare(said: Sequence[MicrobatchSource], call: str) -> None:
    """Raise `RanksDisagree`, on every rank, where two that see the same samples drew others.

    What holds no tensor is not compared: a rank may leave out what it does not use. Inputs that differ where the labels do
    not may be the same samples, changed at random, of which the last stage uses the labels alone: that is warned of.
    """
    known: dict[tuple[int, ...], MicrobatchSource] = {}
    for drawn in (each for each in said if each.inputs):
        other = known.setdefault(drawn.samples, drawn)
        for number in range(min(len(drawn.inputs), len(other.inputs))):
            pairs = {"labels": (other.labels[number], drawn.labels[number]),
                     "inputs": (other.inputs[number], drawn.inputs[number])}
            told = {what: pair for what, pair in pairs.items() if all(each.shapes for each in pair)}
            for what, (one, two) in sorted(told.items()):
                if (one.shapes, one.dtypes) != (two.shapes, two.dtypes):
                    raise RanksDisagree(f"{call}: microbatch {number}: {other.stage} drew {what} of {one}, {drawn.stage} of "
                                        f"{two}; {_FIX}")
            differ = [what for what, (one, two) in told.items() if one.bits != two.bits]
            if "labels" in differ or (differ and drawn.first and other.first):
                raise RanksDisagree(f"{call}: microbatch {number}: {other.stage} and {drawn.stage} drew {differ[0]} of one "
                                    f"shape ({told[differ[0]][0]}) and other values; {_FIX}")
            if differ and "labels" in told:
                warn_once(f"{call}: {other.stage} and {drawn.stage} drew the same labels with other inputs; that is right "
                          f"only if they are the same samples, changed at random. Else {_FIX}")
