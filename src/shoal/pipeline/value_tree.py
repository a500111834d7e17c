"""A value that travels between stages is split into a tree spec and its tensors, and rebuilt at the receiver.

    {"x": tensor, "cache": [tensor, None], "n": 7}   =   {"x": #0, "cache": [#1, None], "n": 7}  +  (tensor, tensor)

The tree spec is the pickled value with a number in place of each tensor, after the shape, dtype and requires_grad of every
tensor, so that the receiver can allocate. Microbatches of the same structure and shapes have equal bytes as tree spec; for
the most common structures (one tensor, or a flat list or tuple of tensors) the bytes are cached. A tensor that occurs
several times in the value has one number and is sent once.
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

__all__ = ["TensorMeta", "TreeSpec", "detached", "flatten_tree", "tensors_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """The facts that a receiver needs to allocate a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_host: bool
    """The tensor is on the CPU at both ends; otherwise on each rank's own device."""


def flatten_tree(value: object, name: str) -> tuple[bytes, list[Tensor]]:
    """Return the tree spec of `value`, in bytes, and its tensors by number.

    `name` names the value in errors. Raises `UsageError` that names the part that cannot be sent: an object that does not
    pickle, or a tensor other than an ordinary dense one.
    """
    kind, tensors, signature = _flat_signature(value)
    cached = _specs.get((kind, signature))
    if cached is not None:
        return cached, tensors
    writer = _TreeWriter()
    try:
        writer.dump(value)
    except Exception as error:  # pickle raises what the object's own methods raise
        part = writer.last
        path = _path_of(value, part) or "a part of the value"
        raise UsageError(f"pipeline, {name}: {path} cannot be sent to another rank: {_described(part)} ({error}). A "
                         f"stage may return tensors, containers of tensors, and objects that pickle") from error
    metas = [(tuple(t.shape), str(t.dtype)[6:], t.requires_grad, t.device.type == "cpu") for t in writer.tensors]
    spec = pickle.dumps(metas, _PROTOCOL) + writer.written
    if kind is not None and len(_specs) < _CACHED_SPECS:
        _specs[kind, signature] = spec
    return spec, writer.tensors


def tensors_in(value: object, name: str) -> list[Tensor]:
    """Return the tensors within `value`, each once, in the order in which they travel; `name` names the value in errors."""
    return [value] if isinstance(value, Tensor) else flatten_tree(value, name)[1]


def detached(value: object, name: str) -> Any:
    """Return `value` as another rank would receive it: its tensors are leaves that share memory and keep requires_grad."""
    spec, tensors = flatten_tree(value, name)
    return TreeSpec(spec).unflatten([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors])


class TreeSpec:
    """A value without its tensors, as the receiver parses it."""

    def __init__(self, data: bytes):
        read = io.BytesIO(data)
        self.metas = tuple(TensorMeta(shape=shape, dtype=getattr(torch, dtype), requires_grad=requires_grad, on_host=on_host)
                           for shape, dtype, requires_grad, on_host in pickle.load(read))
        self.small = is_small([math.prod(meta.shape) * meta.dtype.itemsize for meta in self.metas])
        """Whether a message of this form omits its header when its form was predicted."""
        self._pickled = data[read.tell():]

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Return a new value made of `tensors`, by number."""
        return _TreeReader(self._pickled, tensors).load()


_PROTOCOL = 5

_CACHED_SPECS = 1 << 10
_Signature = tuple[tuple[Any, ...], ...]
_specs: dict[tuple[type | None, _Signature], bytes] = {}
"""Tree specs of flat values by their signature: pickling one anew for every microbatch costs more than sending it."""


def _flat_signature(value: object) -> tuple[type | None, list[Tensor], _Signature]:
    """Return the class, the tensors and the signature of a tensor, or of a list or tuple of distinct tensors and None.

    For every other value, whose parts must all be visited, the class is None.
    """
    kind = type(value)
    parts = cast("Sequence[Any]", value if kind is list or kind is tuple else (value,))
    tensors: list[Tensor] = []
    signature: list[tuple[Any, ...]] = []
    for part in parts:
        if type(part) in (Tensor, nn.Parameter) and part.layout == torch.strided and not (part.is_quantized or part.is_meta):
            tensors.append(part)
            signature.append((part.shape, part.dtype, part.requires_grad, part.device.type))
        elif part is None:
            signature.append(())
        else:
            return None, [], ()
    return (kind, tensors, tuple(signature)) if len(set(map(id, tensors))) == len(tensors) else (None, [], ())


class _TreeWriter(pickle.Pickler):
    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, _PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self.last: object = None
        """The object visited last: the one that failed, if pickling failed."""

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
    def __init__(self, pickled: bytes, tensors: Sequence[Tensor]):
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[pid]


def _described(part: object) -> str:
    if isinstance(part, Tensor):
        return f"it is a {type(part).__name__} of layout {part.layout} on {part.device}"
    return f"it is {repr(part)[:80]} of {type(part).__module__}.{type(part).__qualname__}"


def _path_of(value: object, part: object, path: str = "value") -> str | None:
    """Return the path of `part` within nested containers, as an expression."""
    if value is part:
        return path
    children: Iterator[tuple[object, object]] = iter(())
    if isinstance(value, Mapping):
        children = iter(cast("Mapping[object, object]", value).items())
    elif isinstance(value, list | tuple):
        children = enumerate(cast("Sequence[object]", value))
    found = (_path_of(child, part, f"{path}[{key!r}]") for key, child in children)
    return next((place for place in found if place), None)
