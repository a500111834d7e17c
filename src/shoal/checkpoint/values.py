"""Client state is encoded as JSON and a list of tensors, and decoded to equal values of the same types, without pickle.

JSON values are stored unchanged. Any other value is an object whose key `$` names a codec:

    {"$": "tuple", "items": [1, 2]}     {"$": "tensor", "at": 0}     {"$": "float", "text": "nan"}

Bytes, arrays and tensors go to the list of tensors, which a checkpoint stores in its tensor files. A value without a codec
is an error that names its path. Loading a checkpoint never executes code.
"""

from __future__ import annotations

import io
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from pathlib import Path, PurePath
from typing import Any, cast

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from shoal.checkpoint.tensor_file import CODES
from shoal.errors import CheckpointError, UsageError

__all__ = ["Encoded", "decode", "encode"]

MARK = "$"

ALLOWED = ("None, bool, int, float, complex, str, bytes, BytesIO, list, tuple, dict, OrderedDict, Counter, set, frozenset, "
           "tensors, numpy arrays and scalars, torch.Size, torch.dtype, torch.device, Path, date, datetime, time, timedelta")

Json = dict[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A value as JSON, and the tensors that the JSON refers to by index."""

    json: JsonValue
    tensors: list[Tensor]


def encode(value: object, where: str = "") -> Encoded:
    """Encode `value`; tensors in the result share memory with it where possible.

    Raises UsageError with the path (beginning with `where`) of a value that cannot be saved.
    """
    encoder = _Encoder()
    return Encoded(json=encoder.encode(value, where), tensors=encoder.tensors)


def decode(json: JsonValue, tensor: Callable[[int], Tensor]) -> object:
    """Decode `json`; `tensor(i)` returns tensor i of the encoding. Raises CheckpointError for an unknown codec."""
    match json:
        case list():
            return [decode(item, tensor) for item in json]
        case dict() if MARK in json:
            name = json[MARK]
            if not isinstance(name, str) or name not in _DECODERS:
                raise CheckpointError(f"a value was saved as {name!r}, which this version of Shoal does not "
                                      f"know; it knows {', '.join(sorted(_DECODERS))}")
            return _DECODERS[name](json, lambda item: decode(item, tensor), tensor)
        case dict():
            return {key: decode(item, tensor) for key, item in json.items()}
        case _:
            return json


class _Encoder:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._open: set[int] = set()

    def encode(self, value: object, where: str) -> JsonValue:
        """Encode one value at the path `where`."""
        kind = type(value)
        if kind is str:
            return _encodable(cast(str, value), where)
        if value is None or kind in (bool, int):
            return cast(JsonValue, value)
        if isinstance(value, list | tuple | dict | set | frozenset):
            return self._container(cast("Iterable[object]", value), kind, where)
        if kind is float:
            number = cast(float, value)
            return number if math.isfinite(number) else {MARK: "float", "text": repr(number)}
        return self._leaf(value, kind, where)

    def _container(self, value: Iterable[object], kind: type, where: str) -> JsonValue:
        if id(value) in self._open:
            raise UsageError(f"{where or 'the value'}: contains itself, which a checkpoint cannot store")
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                return self._mapping(cast("dict[object, object]", value), kind, where)
            if kind is list:
                return self._items(value, where)
            if kind in _SEQUENCES:
                ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
                return {MARK: _SEQUENCES[kind], "items": self._items(ordered, where)}
        finally:
            self._open.discard(id(value))
        raise _unsupported(value, kind, where)

    def _items(self, items: Iterable[object], where: str) -> list[JsonValue]:
        return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(items)]

    def _mapping(self, value: dict[object, object], kind: type, where: str) -> JsonValue:
        if kind not in _MAPPINGS:
            raise _unsupported(value, kind, where)
        if kind is dict and all(type(key) is str for key in value) and MARK not in value:
            return {_encodable(str(key), f"{where}.keys()"): self.encode(item, _join(where, key))
                    for key, item in value.items()}
        pairs: list[JsonValue] = [[self.encode(key, f"{where}.keys()[{i}]"), self.encode(item, _join(where, key))]
                                  for i, (key, item) in enumerate(value.items())]
        return {MARK: _MAPPINGS[kind], "pairs": pairs}

    def _leaf(self, value: object, kind: type, where: str) -> JsonValue:
        match value:
            case complex() if kind is complex:
                return {MARK: "complex", "parts": self._items((value.real, value.imag), where)}
            case io.BytesIO() if kind is io.BytesIO:  # as some layers return it from get_extra_state
                return {MARK: "bytes_io", "at": self._add_tensor(_raw(value.getvalue()))}
            case bytes() | bytearray() if kind in (bytes, bytearray):
                return {MARK: kind.__name__, "at": self._add_tensor(_raw(value))}
            case Tensor() if kind in (Tensor, torch.nn.Parameter):
                return self._tensor(value.detach(), where)
            case np.ndarray() | np.generic():
                return self._array(np.asarray(cast(Any, value)), kind, where)
            case torch.dtype():
                return {MARK: "dtype", "text": str(value).removeprefix("torch.")}
            case torch.device():
                return {MARK: "device", "text": str(value)}
            case PurePath():
                return {MARK: "path", "text": str(value)}
            case date() | time() if kind in (date, datetime, time):
                return {MARK: kind.__name__, "text": value.isoformat()}
            case timedelta() if kind is timedelta:
                return {MARK: "timedelta", "parts": [value.days, value.seconds, value.microseconds]}
            case _:
                raise _unsupported(value, kind, where)

    def _tensor(self, value: Tensor, where: str) -> JsonValue:
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            raise UsageError(f"{where}: got a tensor without plain data ({value.layout}, {value.device}); save a dense one")
        if value.dtype in CODES:
            return {MARK: "tensor", "at": self._add_tensor(value)}
        name = str(value.dtype).removeprefix("torch.")  # not in the file format: store the raw bytes
        raw = value.contiguous().reshape(-1).view(torch.uint8)
        return {MARK: "raw_tensor", "at": self._add_tensor(raw), "dtype": name, "shape": list(value.shape)}

    def _array(self, value: np.ndarray[Any, Any], kind: type, where: str) -> JsonValue:
        if value.dtype.hasobject or value.dtype.fields is not None:
            raise UsageError(f"{where}: got a numpy array of dtype {value.dtype}, whose elements are objects or records; "
                             "save it as a list, or as a dict with one array per field")
        scalar = issubclass(kind, np.generic)
        return {MARK: "scalar" if scalar else "array", "at": self._add_tensor(_raw(value.tobytes())),
                "dtype": value.dtype.str, "shape": list(value.shape)}

    def _add_tensor(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _raw(data: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: got {text!r}, which UTF-8 cannot encode (a lone surrogate, as in some file names); "
                         f"save os.fsencode of it, as bytes") from error
    return text


def _join(where: str, key: object) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{where}.{key}" if where else key
    return f"{where}[{key!r}]"


def _unsupported(value: object, kind: type, where: str) -> UsageError:
    fix = "save its state_dict() instead" if callable(getattr(kind, "state_dict", None)) else \
        "convert it to one of these, for example to a dict of its fields"
    return UsageError(f"{where or 'the value'}: got {kind.__module__}.{kind.__qualname__}, which cannot be saved without "
                      f"pickle; allowed: {ALLOWED}; {fix}")


# -- decoders ------------------------------------------------------------------
_Decoder = Callable[[Json, Callable[[JsonValue], Any], Callable[[int], Tensor]], object]

_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}


def _items(build: Callable[[Any], object]) -> _Decoder:
    return lambda json, inner, _: build(inner(json["items"]))


def _pairs(build: Callable[[Any], object]) -> _Decoder:
    return lambda json, inner, _: build({key: item for key, item in inner(json["pairs"])})


def _text(build: Callable[[str], object]) -> _Decoder:
    return lambda json, _, __: build(cast(str, json["text"]))


def _parts(build: Callable[..., object]) -> _Decoder:
    return lambda json, inner, _: build(*inner(json["parts"]))


def _at(build: Callable[[Tensor], object]) -> _Decoder:
    return lambda json, _, tensor: build(tensor(cast(int, json["at"])))


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a tensor was saved as {name}, a dtype that torch {torch.__version__} does not have")
    return dtype


def _raw_tensor(json: Json, inner: Callable[[JsonValue], Any], tensor: Callable[[int], Tensor]) -> Tensor:
    return tensor(cast(int, json["at"])).view(_dtype(cast(str, json["dtype"]))).reshape(cast("list[int]", json["shape"]))


def _array(json: Json, inner: Callable[[JsonValue], Any], tensor: Callable[[int], Tensor]) -> np.ndarray[Any, Any]:
    data = tensor(cast(int, json["at"])).numpy().tobytes()
    shape = cast("list[int]", json["shape"])
    return np.frombuffer(bytearray(data), dtype=np.dtype(cast(str, json["dtype"]))).reshape(shape)


_DECODERS: dict[str, _Decoder] = {
    "tuple": _items(tuple), "set": _items(set), "frozenset": _items(frozenset), "size": _items(torch.Size),
    "dict": _pairs(dict), "ordered_dict": _pairs(OrderedDict), "counter": _pairs(Counter),
    "float": _text(float), "dtype": _text(_dtype), "device": _text(torch.device), "path": _text(Path),
    "date": _text(date.fromisoformat), "datetime": _text(datetime.fromisoformat), "time": _text(time.fromisoformat),
    "complex": _parts(complex), "timedelta": _parts(timedelta),
    "tensor": _at(lambda tensor: tensor), "raw_tensor": _raw_tensor,
    "bytes": _at(lambda tensor: tensor.numpy().tobytes()),
    "bytes_io": _at(lambda tensor: io.BytesIO(tensor.numpy().tobytes())),
    "bytearray": _at(lambda tensor: bytearray(tensor.numpy().tobytes())),
    "array": _array, "scalar": lambda json, inner, tensor: _array(json, inner, tensor)[()],
}
