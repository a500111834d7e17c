"""A message on the wire: a header, what it announces, and the tensors of the value.

    16 bytes                    number of its form, 0                                  the form is known
    16 bytes + the skeleton     -1, bytes of the skeleton                              the form is new
    16 bytes + the text         -2, bytes of the text                                  an abort; nothing follows
    nothing                                                                            the form is foreseen, and small
    the tensors                 each once, contiguous, as they are

Both ends number the forms as they come, and remember the `KNOWN` that were used last. Both foresee the form of a message
from the same two before it; where it is so, and small, the message is its tensors alone. Where a small one was foreseen
and something else comes, the tensors that the receiver has made room for are filled with `FILLER` first.

Headers, texts and tensors have tags of their own, and the tensors of each of the first `KNOWN` forms have one to themselves,
so that a receiver may ask for what it foresees: if something else comes, what it asked for waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shoal.pipeline.wire import TAGS

__all__ = ["ABORT", "AHEAD", "FILLER", "HEADERS", "HEADER_BYTES", "KNOWN", "NEW", "SMALL", "TEXTS", "FormPredictor",
           "is_small",
           "tag_of"]

HEADER_BYTES = 16
NEW, ABORT = -1, -2

KNOWN = 64
"""The forms that both ends remember; the one not used for longest makes room for a new one."""

AHEAD = 2
"""The messages that a receiver takes in before they are asked for."""

SMALL = 1 << 16
"""The most bytes of a message that a header would make notably slower."""

FILLER = bytes.fromhex("829e8a1caea52d84ff40d3b66bb38abd")
"""The first bytes of tensors that are none; no number that is meant looks like it."""

HEADERS, TEXTS, _OTHERS, _FIRST = range(4)
"""Tags of the wire."""


def tag_of(number: int) -> int:
    """Return the tag of the tensors of form `number`."""
    assert _FIRST + KNOWN <= TAGS
    return _FIRST + number if number < KNOWN else _OTHERS


def is_small(sizes: Sequence[int]) -> bool:
    """Whether a foreseen message of tensors of `sizes` bytes travels without a header."""
    first = next((size for size in sizes if size), 0)
    return first >= len(FILLER) and sum(sizes) <= SMALL


class FormPredictor:
    """The forms that came last, and what they say of those to come: two alike in a row go on.

    What a receiver may ask for early, it does before it has the `AHEAD` messages in between: they say nothing.
    """

    def __init__(self) -> None:
        self._forms = deque(range(-AHEAD - 2, 0), maxlen=AHEAD + 2)
        self._count = 0

    def came(self, number: int) -> None:
        """Take note of the form of the next message."""
        self._forms.append(number)
        self._count += 1

    def of(self, index: int) -> int:
        """Return the form that is foreseen for message `index`, at most `AHEAD` after those that came; -1 for none."""
        place = index - AHEAD - 1 - self._count
        form = self._forms[place]
        return form if form == self._forms[place - 1] and form < KNOWN else -1
