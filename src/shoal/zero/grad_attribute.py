"""The attribute `grad` of a parameter as a script sees it, which may differ from the one that autograd writes.

While a `GradReader` of its owner answers for it, the class of a parameter is a subclass of the same name whose `grad` is a
property, or that of a released parameter (guard.py). Everything else of the parameter is as it was.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.zero.ownership import GradReader, owner_of

__all__ = ["clear_raw_grads", "hide_grads", "note_answering", "raw_grad", "read_grad", "set_raw_grad", "show_grads",
           "take_raw_grad", "take_raw_grads", "unanswered_grads", "write_grad"]

_GRAD: Any = vars(torch._C.TensorBase)["grad"]  # pyright: ignore[reportPrivateUsage]  the attribute that autograd writes

_readable: dict[type, type] = {}  # by class, the one whose `grad` is answered for; that of a released parameter is itself
_plain: dict[type, type] = {}


_unanswered: ContextVar[bool] = ContextVar("unanswered", default=False)


@contextmanager
def unanswered_grads() -> Generator[None]:
    """Within the context a parameter's `grad` is the attribute that autograd writes: no script asks for the gradient."""
    token = _unanswered.set(True)
    try:
        yield
    finally:
        _unanswered.reset(token)


def read_grad(parameter: nn.Parameter) -> Tensor | None:
    """Return `parameter.grad` as a script sees it."""
    return raw_grad(parameter) if (reader := _reader(parameter)) is None else reader.read(parameter)


def write_grad(parameter: nn.Parameter, value: Tensor | None) -> None:
    """Set `parameter.grad` as a script does."""
    if (reader := _reader(parameter)) is None:
        set_raw_grad(parameter, value)
    else:
        reader.write(parameter, value)


def raw_grad(parameter: Tensor) -> Tensor | None:
    """Return the attribute that autograd writes."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return cast("Tensor | None", _GRAD.__get__(parameter))


def set_raw_grad(parameter: Tensor, value: Tensor | None) -> None:
    """Set the attribute that autograd writes."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        _GRAD.__set__(parameter, value)


def take_raw_grad(parameter: Tensor) -> Tensor | None:
    """Return the attribute that autograd writes, and set it to None."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        value = cast("Tensor | None", _GRAD.__get__(parameter))
        _GRAD.__set__(parameter, None)
    return value


def take_raw_grads(parameters: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Return the attributes that autograd writes, with the number of each parameter that has one, and set them to None."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        found = [(number, value) for number, parameter in enumerate(parameters)
                 if (value := cast("Tensor | None", _GRAD.__get__(parameter))) is not None]
        for number, _ in found:
            _GRAD.__set__(parameters[number], None)
    return found


def clear_raw_grads(parameters: Iterable[Tensor]) -> None:
    """Set the attribute that autograd writes to None."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        for parameter in parameters:
            _GRAD.__set__(parameter, None)


def note_answering(released: type) -> None:
    """Note that `grad` of the class `released` is answered for without a change of class."""
    _readable[released] = released


def show_grads(parameters: Iterable[nn.Parameter]) -> None:
    """Have the `grad` of `parameters` be answered for."""
    for parameter in parameters:
        plain = type(parameter)
        if (readable := _readable.get(plain) or _new_class(plain)) is not plain:
            parameter.__class__ = readable


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
    owner = owner_of(parameter)
    return None if owner is None or _unanswered.get() else owner.grads


def _delete_grad(parameter: nn.Parameter) -> None:
    write_grad(parameter, None)


def _deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Copy the parameter as one of its own class."""
    plain = type(parameter).__mro__[1]
    copied = cast("nn.Parameter", plain.__deepcopy__(parameter, memo))
    copied.__class__ = plain
    return copied
