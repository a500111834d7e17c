"""The wire format of a channel: a message is an optional header, its text, and the tensors of one value.

The *form* of a message is its tree spec: structure, shapes and dtypes. Both ends number the forms in the order of arrival.

    16 bytes                    form number, 0                         the form is known
    16 bytes + the tree spec    -1, bytes of the tree spec             the form is new
    16 bytes + the text         -2, bytes of the text                  an abort; nothing follows
    no bytes                                                           the form was predicted, and the message is small
    the tensors                 each once, contiguous, unconverted

Both ends keep the `KNOWN_FORMS` forms used last, and both predict the form of a message from the same two messages before
it. A small message whose form was predicted is sent as its tensors alone. If a small message was predicted and another form
follows, the sender first fills the tensors that the receiver has posted with `FILLER`.

Headers, texts and tensors have separate tags, and each of the first `KNOWN_FORMS` forms has a tag for its tensors. So a
receiver may post receives for a predicted form: if another form arrives, those receives stay pending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shoal.pipeline.wire import TAGS

__all__ = ["ABORT", "AHEAD", "FILLER", "HEADER_BYTES", "HEADER_TAG", "KNOWN_FORMS", "NEW_FORM", "SMALL_BYTES", "TEXT_TAG",
           "FormPredictor", "is_small", "tensor_tag"]

HEADER_BYTES = 16
NEW_FORM, ABORT = -1, -2
"""Header values in place of a form number."""

KNOWN_FORMS = 64
"""Forms that both ends keep; a new form evicts the least recently used one."""

AHEAD = 2
"""Messages that a receiver takes in before its caller asks for them."""

SMALL_BYTES = 1 << 16
"""Messages up to this size omit the header when their form was predicted; for larger ones a header costs next to nothing."""

FILLER = bytes.fromhex("829e8a1caea52d84ff40d3b66bb38abd")
"""The first bytes of tensors that carry no value; a random constant that real data does not start with."""

HEADER_TAG, TEXT_TAG, _OTHER_TENSORS_TAG, _FIRST_TENSOR_TAG = range(4)


def tensor_tag(form: int) -> int:
    """Return the tag for the tensors of form number `form`."""
    assert _FIRST_TENSOR_TAG + KNOWN_FORMS <= TAGS
    return _FIRST_TENSOR_TAG + form if form < KNOWN_FORMS else _OTHER_TENSORS_TAG


def is_small(sizes: Sequence[int]) -> bool:
    """Return whether a message with tensors of `sizes` bytes omits its header when its form was predicted."""
    first = next((size for size in sizes if size), 0)
    return first >= len(FILLER) and sum(sizes) <= SMALL_BYTES


class FormPredictor:
    """Predicts the forms of the next messages: a form that came twice in a row will come again.

    A receiver posts receives up to `AHEAD` messages early, so the prediction for message i uses messages up to i-AHEAD-1.
    """

    def __init__(self) -> None:
        self._forms = deque(range(-AHEAD - 2, 0), maxlen=AHEAD + 2)
        self._count = 0

    def record(self, form: int) -> None:
        """Record the form of the next message."""
        self._forms.append(form)
        self._count += 1

    def predict(self, index: int) -> int:
        """Return the form predicted for message `index`, at most `AHEAD` after the recorded ones; -1 for no prediction."""
        place = index - AHEAD - 1 - self._count
        form = self._forms[place]
        return form if form == self._forms[place - 1] and form < KNOWN_FORMS else -1
