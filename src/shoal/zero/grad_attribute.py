"""The attribute `grad` of a parameter as a script sees it, which may be other than the one that autograd writes.

While an engine answers for it, the class of a parameter is a subclass of the same name whose `grad` is a property, or that
of a released parameter (guard.py). Everything else of the parameter is as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["GradReader", "answer_grad", "clear_raw_grads", "hide_grads", "note_answering", "note_open", "raw_grad",
           "read_grad", "show_grad", "show_grads", "take_raw_grad", "write_grad"]

_GRAD: Any = vars(torch._C.TensorBase)["grad"]  # pyright: ignore[reportPrivateUsage]  the attribute that autograd writes


class GradReader(Protocol):
    """What answers for the `grad` of parameters while it is open."""

    @property
    def is_open(self) -> bool:
        """Whether it answers at present."""
        ...

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of `parameter`."""
        ...

    def write(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace the gradient of `parameter`."""
        ...


_readers = WeakIdKeyDictionary()
_open: WeakSet[GradReader] = WeakSet()
_readable: dict[type, type] = {}  # by class, the one whose `grad` is answered for; that of a released parameter is itself
_plain: dict[type, type] = {}


def answer_grad(parameter: nn.Parameter, reader: GradReader | None) -> None:
    """Have `reader` answer for the `grad` of `parameter` whenever it is open; None: nothing does."""
    if reader is None:
        _readers.pop(parameter, None)
    else:
        _readers[parameter] = reader


def note_open(reader: GradReader, *, is_open: bool) -> None:
    """Note that `reader` opens or closes."""
    (_open.add if is_open else _open.discard)(reader)


def read_grad(parameter: nn.Parameter) -> Tensor | None:
    """Return `parameter.grad` as a script sees it."""
    reader = _reader(parameter)
    return raw_grad(parameter) if reader is None else reader.read(parameter)


def write_grad(parameter: nn.Parameter, value: Tensor | None) -> None:
    """Set `parameter.grad` as a script does."""
    if (reader := _reader(parameter)) is None:
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            _GRAD.__set__(parameter, value)
    else:
        reader.write(parameter, value)


def raw_grad(parameter: Tensor) -> Tensor | None:
    """Return the attribute that autograd writes."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return cast("Tensor | None", _GRAD.__get__(parameter))


def take_raw_grad(parameter: Tensor) -> Tensor | None:
    """Return the attribute that autograd writes, and set it to None."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        value = cast("Tensor | None", _GRAD.__get__(parameter))
        _GRAD.__set__(parameter, None)
    return value


def clear_raw_grads(parameters: Iterable[Tensor]) -> None:
    """Set the attribute that autograd writes to None."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        for parameter in parameters:
            _GRAD.__set__(parameter, None)


def note_answering(released: type) -> None:
    """Note that `grad` of the class `released` is answered for without a change of class."""
    _readable[released] = released


def show_grads(parameters: Iterable[nn.Parameter]) -> None:
    """Have the `grad` of `parameters`, whose readers are open, be answered for."""
    for parameter in parameters:
        plain = type(parameter)
        if (readable := _readable.get(plain) or _new_class(plain)) is not plain:
            parameter.__class__ = readable


def show_grad(parameter: nn.Parameter) -> None:
    """Have the `grad` of a parameter be answered for, if its reader is open."""
    if _open and _reader(parameter) is not None:
        show_grads((parameter,))


def hide_grads(parameters: Iterable[nn.Parameter]) -> None:
    """Give `parameters` whose `grad` is answered for their own class back; released ones keep theirs."""
    for parameter in parameters:
        if (plain := _plain.get(type(parameter))) is not None:
            parameter.__class__ = plain


def _new_class(plain: type) -> type:
    readable = type(plain.__name__, (plain,), {"grad": property(read_grad, write_grad, _delete_grad),
                                               "__deepcopy__": _deepcopy, "__module__": plain.__module__})
    _readable[plain] = _readable[readable] = readable
    _plain[readable] = plain
    return readable


def _reader(parameter: nn.Parameter) -> GradReader | None:
    reader: GradReader | None = _readers.get(parameter)
    return reader if reader is not None and reader.is_open else None


def _delete_grad(parameter: nn.Parameter) -> None:
    write_grad(parameter, None)


def _deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Copy the parameter as one of its own class."""
    plain = type(parameter).__mro__[1]
    copied = cast("nn.Parameter", plain.__deepcopy__(parameter, memo))
    copied.__class__ = plain
    return copied
