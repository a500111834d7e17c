"""What travels between two stages, taken apart: a skeleton, which is the value without its tensors, and the tensors.

    {"x": tensor, "cache": [tensor, None], "n": 7}   =   {"x": #0, "cache": [#1, None], "n": 7}  +  (tensor, tensor)

A skeleton is the pickled value in which each tensor's number stands for it, behind the shape, dtype and requires_grad of
each tensor, so that a receiver can make room. It is the same bytes for every microbatch of the same form, and of the
forms that are most common (a tensor, or a row of them) it is remembered. A tensor that occurs several times has one number
and travels once.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.pipeline.message import is_small

__all__ = ["Form", "Skeleton", "flatten_tree"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a receiver has to know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_host: bool
    """It rests on the host and does so at the other end too; else on the device of whoever has it."""


def flatten_tree(value: object, what: str) -> tuple[bytes, list[Tensor]]:
    """Return the skeleton of `value`, in bytes, and its tensors by number.

    `what` names the way in errors. Raises `UsageError` naming the part that cannot travel: an object that does not pickle,
    or a tensor other than an ordinary dense one.
    """
    kind, tensors, forms = _row(value)
    known = _skeletons.get((kind, forms))
    if known is not None:
        return known, tensors
    writer = _TreeWriter()
    try:
        writer.dump(value)
    except Exception as error:  # pickle raises what the object's own methods raise
        part = writer.last
        raise UsageError(f"pipeline, {what}: {_where(value, part) or 'a part of the value'} cannot travel to another rank: "
                         f"{_described(part)} ({error}). What goes from layer to layer over a stage's boundary is tensors, "
                         f"containers of them, and objects that pickle") from error
    announced = [(tuple(t.shape), str(t.dtype)[6:], t.requires_grad, t.device.type == "cpu") for t in writer.tensors]
    skeleton = pickle.dumps(announced, _PROTOCOL) + writer.written
    if kind is not None and len(_skeletons) < _REMEMBERED:
        _skeletons[kind, forms] = skeleton
    return skeleton, writer.tensors


class Skeleton:
    """A value without its tensors, at the receiver."""

    def __init__(self, written: bytes):
        read = io.BytesIO(written)
        self.forms = tuple(Form(shape=shape, dtype=getattr(torch, dtype), requires_grad=requires_grad, on_host=on_host)
                           for shape, dtype, requires_grad, on_host in pickle.load(read))
        self.small = is_small([math.prod(form.shape) * form.dtype.itemsize for form in self.forms])
        """Whether a message of it needs no header where it is foreseen."""
        self._written = written[read.tell():]

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value, made anew, of `tensors` by number."""
        return _TreeReader(self._written, tensors).load()


_PROTOCOL = 5

_REMEMBERED = 1 << 10
_Forms = tuple[tuple[Any, ...], ...]
_skeletons: dict[tuple[type | None, _Forms], bytes] = {}
"""By what a row is made of: to pickle it anew for every microbatch costs more than to send it."""


def _row(value: object) -> tuple[type | None, list[Tensor], _Forms]:
    """Return the class of a tensor, or of a list or tuple of different ones and None, its tensors, and what they are.

    Of anything else, which takes a look at every part of it, return None for the class.
    """
    kind = type(value)
    parts = cast("Sequence[Any]", value if kind is list or kind is tuple else (value,))
    tensors: list[Tensor] = []
    forms: list[tuple[Any, ...]] = []
    for part in parts:
        if type(part) in (Tensor, nn.Parameter) and part.layout == torch.strided and not (part.is_quantized or part.is_meta):
            tensors.append(part)
            forms.append((part.shape, part.dtype, part.requires_grad, part.device.type))
        elif part is None:
            forms.append(())
        else:
            return None, [], ()
    return (kind, tensors, tuple(forms)) if len(set(map(id, tensors))) == len(tensors) else (None, [], ())


class _TreeWriter(pickle.Pickler):
    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, _PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self.last: object = None
        """What was being written last: the culprit, if that failed."""

    @property
    def written(self) -> bytes:
        return self._file.getvalue()

    def persistent_id(self, obj: Any) -> int | None:
        self.last = obj
        if not isinstance(obj, Tensor):
            return None
        if type(obj) not in (Tensor, nn.Parameter) or obj.layout != torch.strided or obj.is_quantized or obj.is_meta:
            raise TypeError("only dense tensors of torch's own class can")
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


class _TreeReader(pickle.Unpickler):
    def __init__(self, written: bytes, tensors: Sequence[Tensor]):
        super().__init__(io.BytesIO(written))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[pid]


def _described(part: object) -> str:
    if isinstance(part, Tensor):
        return f"it is a {type(part).__name__} of layout {part.layout} on {part.device}"
    return f"it is {repr(part)[:80]} of {type(part).__module__}.{type(part).__qualname__}"


def _where(value: object, part: object, path: str = "value") -> str | None:
    """Return where within containers `part` is, as an expression."""
    if value is part:
        return path
    children: Iterator[tuple[object, object]] = iter(())
    if isinstance(value, Mapping):
        children = iter(cast("Mapping[object, object]", value).items())
    elif isinstance(value, list | tuple):
        children = enumerate(cast("Sequence[object]", value))
    found = (_where(child, part, f"{path}[{key!r}]") for key, child in children)
    return next((place for place in found if place), None)
