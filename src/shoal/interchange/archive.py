"""`load_archive` parses a file of `torch.save` without unpickling it: no class is imported and no function is called.

The pickle in such a file is a program for a stack machine. `_Machine` interprets its opcodes and builds tensors and plain
containers only. A name that is not in `_CONSTRUCTORS` becomes an `Opaque` record of the name and its arguments, so that a
file that refers to unknown classes still loads and nothing of them runs. Tensors are views of the mapped file: their
bytes are read when they are copied.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shoal.errors import CheckpointError

__all__ = ["Opaque", "integer", "load_archive"]

LOCAL_HEADER = struct.Struct("<26xHH")
"""The lengths of the name and of the extra field of a zip entry's local header."""


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """An object of a class that is not known here: the name of its class, what built it, and its attributes."""

    name: str
    args: tuple[object, ...] = ()
    state: dict[object, object] | None = None
    """Empty where the class saves its state in a form of its own; None: the file sets no attributes."""

    def attribute(self, name: str) -> object:
        """Return one saved attribute. Raises CheckpointError if the file has none of this name."""
        if self.state is None or name not in self.state:
            raise CheckpointError(f"an object of {self.name} without the attribute {name!r}")
        return self.state[name]


@dataclass(frozen=True, slots=True)
class _Global:
    """A name that the file refers to; it is looked up in tables and never imported."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """The bytes of one storage as a view of the mapped file."""

    data: Tensor
    dtype: torch.dtype


def load_archive(path: Path) -> Any:
    """Return the object in a file of `torch.save`: tensors, plain containers, numbers, text and `Opaque` records.

    Raises CheckpointError if the file is no archive of torch, is damaged, or needs an opcode that is not allowed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _Archive(path, archive).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path}: damaged, or written by torch before 1.6 ({error}); load and save it again with "
                              "a newer torch") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path}: damaged, its contents cannot be parsed ({type(error).__name__}: {error})") from error


def integer(value: object) -> int:
    """Return a number that was saved plainly, as a tensor, or as a member of an enumeration of integers."""
    match value:
        case Tensor():
            return int(value.item())
        case Opaque(args=(int() as number,)):
            return number
        case int() | float():
            return int(value)
        case _:
            raise CheckpointError(f"expected a number, got {value!r}")


class _Archive:
    """One open file; entries are found by their names below its only top folder."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path = path
        self.archive = archive
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{path}: is not a file of torch.save: it has no entry data.pkl")
        self.top = pickles[0].removesuffix("data.pkl")

    def load(self) -> object:
        if f"{self.top}byteorder" in self.archive.namelist() and self.archive.read(f"{self.top}byteorder") != b"little":
            raise CheckpointError(f"{self.path}: was written on a big-endian machine, which is not supported")
        return _Machine(self.archive.read(f"{self.top}data.pkl"), self.storage, self.path).run()

    @cached_property
    def mapped(self) -> Tensor:
        """The bytes of the file, mapped privately."""
        return torch.from_file(str(self.path), shared=False, size=self.path.stat().st_size, dtype=torch.uint8)

    def storage(self, record: object) -> _Storage:
        """Return the storage that a persistent id names."""
        match record:
            case ("storage", _Global(name=kind), str() as key, *_):
                pass
            case _:
                raise CheckpointError(f"{self.path}: refers to {record!r}, which is not a tensor's storage")
        entry = self.archive.getinfo(f"{self.top}data/{key}")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self.path}: is compressed; torch.save writes uncompressed entries")
        name, extra = LOCAL_HEADER.unpack(bytes(self.mapped[entry.header_offset:entry.header_offset + 30].tolist()))
        start = entry.header_offset + 30 + name + extra
        if start + entry.file_size > len(self.mapped):
            raise CheckpointError(f"{self.path}: truncated, storage {key} ends at byte {start + entry.file_size} of "
                                  f"{len(self.mapped)}")
        dtype = _STORAGES.get(kind)
        if dtype is None:
            raise CheckpointError(f"{self.path}: holds a storage of kind {kind}, which is not supported")
        return _Storage(self.mapped[start:start + entry.file_size], dtype)


def _tensor(storage: object, offset: object, size: object, stride: object, *_: object,
            dtype: torch.dtype | None = None) -> Tensor:
    """Build a view of a storage; its extent is checked before torch sees it."""
    if not isinstance(storage, _Storage):
        raise CheckpointError("a tensor without a storage")
    shape, strides = cast("tuple[int, ...]", size), cast("tuple[int, ...]", stride)
    kind, first = dtype or storage.dtype, cast("int", offset)
    last = first + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
    if min((first, *shape, *strides)) < 0 or (prod(shape) and (last + 1) * kind.itemsize > len(storage.data)):
        raise CheckpointError(f"a tensor of shape {shape} exceeds its storage of {len(storage.data)} bytes")
    if not prod(shape):
        return torch.empty(shape, dtype=kind)
    used = storage.data[first * kind.itemsize:(last + 1) * kind.itemsize]
    if used.storage_offset() % kind.itemsize:  # an archive that aligns its entries to fewer bytes
        used = used.clone()
    return used.view(kind).as_strided(shape, strides)


def _tensor_of_dtype(storage: object, offset: object, size: object, stride: object, requires_grad: object, hooks: object,
                     dtype: object, *_: object) -> Tensor:
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a tensor of unknown dtype {dtype!r}")
    return _tensor(storage, offset, size, stride, dtype=dtype)


def _first(value: object = None, *_: object) -> object:
    return value


def _plain_dict(pairs: object = (), *_: object) -> dict[object, object]:
    return dict(cast("list[tuple[object, object]]", pairs))


def _plain_tuple(items: object = ()) -> tuple[object, ...]:
    return tuple(cast("list[object]", items))


def _encoded(text: object, encoding: object) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise CheckpointError(f"bytes in the encoding {encoding!r}")
    return cast("str", text).encode("latin1")


def _numpy_number(kind: object, data: object) -> object:
    """Return a saved numpy scalar as a number of Python."""
    code = kind.args[0] if isinstance(kind, Opaque) and kind.args else None
    format = _NUMPY.get(cast("str", code))
    if format is None or not isinstance(data, bytes):
        return Opaque("numpy.scalar", (kind, data))
    return struct.unpack("<" + format, data)[0]


_NUMPY = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "u8": "Q", "u4": "I", "u2": "H",
          "u1": "B", "b1": "?"}
"""The format of `struct` for each numpy dtype of one number."""

_STORAGES: Mapping[str, torch.dtype] = {
    f"torch.{name}Storage": dtype for name, dtype in {
        "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128}.items()
} | {"torch.storage.UntypedStorage": torch.uint8}

_DTYPES: Mapping[str, torch.dtype] = {f"torch.{name}": dtype for name, dtype in vars(torch).items()
                                      if isinstance(dtype, torch.dtype)}

_CONSTRUCTORS: Mapping[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _first,
    "torch.Size": _plain_tuple,
    "torch.device": lambda *words: ":".join(map(str, words)),
    "collections.OrderedDict": _plain_dict,
    "collections.defaultdict": lambda *_: {},
    "builtins.dict": _plain_dict,
    "builtins.list": lambda *items: list(_plain_tuple(*items)),
    "builtins.tuple": _plain_tuple,
    "builtins.set": lambda *items: set(_plain_tuple(*items)),
    "builtins.frozenset": lambda *items: frozenset(_plain_tuple(*items)),
    "builtins.bytearray": lambda *items: bytes(cast("bytes", items[0])) if items else b"",
    "_codecs.encode": _encoded,
    "numpy.core.multiarray.scalar": _numpy_number,
    "numpy._core.multiarray.scalar": _numpy_number,
    "pathlib.PosixPath": lambda *parts: str(Path(*cast("tuple[str, ...]", parts))),
}
"""The names that are built, all as plain containers; each entry is our own function."""

_OLD_BUILTINS = "__builtin__."

_PUSHED = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE",
                     "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
                     "BYTEARRAY8"})
"""Opcodes that push their argument."""
_CONSTANTS: Mapping[str, Callable[[], object]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_LIST": list[object],
    "EMPTY_DICT": dict[object, object], "EMPTY_TUPLE": tuple[object, ...], "EMPTY_SET": set[object]}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STORES = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_LOADS = frozenset({"GET", "BINGET", "LONG_BINGET"})


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(self, program: bytes, storage: Callable[[object], _Storage], path: Path) -> None:
        self._program = program
        self._storage = storage
        self._path = path
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}

    def run(self) -> object:
        """Interpret the program and return the object that it leaves."""
        for opcode, arg, _ in pickletools.genops(self._program):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._do(opcode.name, arg)
        raise ValueError("the program has no end")

    def _do(self, name: str, arg: Any) -> None:
        stack = self._stack
        if name in _PUSHED:
            stack.append(arg)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _STORES:
            self._memo[int(arg)] = stack[-1]
        elif name in _LOADS:
            stack.append(self._memo[int(arg)])
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        else:
            self._structure(name, arg)

    def _structure(self, name: str, arg: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "MARK":
                self._marks.append(len(stack))
            case "POP":
                stack.pop()
            case "POP_MARK":
                self._items()
            case "DUP":
                stack.append(stack[-1])
            case "TUPLE" | "LIST" | "FROZENSET":
                items = self._items()
                stack.append({"TUPLE": tuple, "LIST": list, "FROZENSET": frozenset}[name](items))
            case "DICT":
                stack.append(_paired(self._items()))
            case "APPEND":
                item = stack.pop()
                cast("list[object]", _of(list, stack[-1])).append(item)
            case "APPENDS":
                items = self._items()
                cast("list[object]", _of(list, stack[-1])).extend(items)
            case "ADDITEMS":
                items = self._items()
                cast("set[object]", _of(set, stack[-1])).update(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._update({key: value})
            case "SETITEMS":
                self._update(_paired(self._items()))
            case "GLOBAL":
                stack.append(_Global(".".join(cast("str", arg).split(" ", 1)).replace(_OLD_BUILTINS, "builtins.")))
            case "STACK_GLOBAL":
                word, module = stack.pop(), stack.pop()
                stack.append(_Global(f"{_of(str, module)}.{_of(str, word)}"))
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE" | "NEWOBJ":
                args = cast("tuple[object, ...]", _of(tuple, stack.pop()))
                stack.append(_built(stack.pop(), args))
            case "NEWOBJ_EX":
                keywords, args = stack.pop(), cast("tuple[object, ...]", _of(tuple, stack.pop()))
                stack.append(_built(stack.pop(), (*args, keywords)))
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], Opaque):
                    stack[-1] = self._with_state(stack[-1], state)
            case _:
                raise CheckpointError(f"{self._path}: uses the opcode {name}, which is not allowed in a checkpoint")

    def _with_state(self, built: Opaque, state: object) -> Opaque:
        """Return the record with its attributes, also under the numbers by which later opcodes recall it."""
        attributes: dict[object, object] = cast("dict[object, object]", state) if isinstance(state, dict) else {}
        whole = Opaque(built.name, built.args, attributes)
        self._memo.update({number: whole for number, value in self._memo.items() if value is built})
        return whole

    def _update(self, pairs: dict[object, object]) -> None:
        match self._stack[-1]:
            case dict() as target:
                cast("dict[object, object]", target).update(pairs)
            case Opaque():  # a subclass of dict: its items are of no use without its class
                pass
            case other:
                raise TypeError(f"items are set in {type(other).__name__}")

    def _items(self) -> list[object]:
        """Pop the objects above the last mark."""
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items


def _built(target: object, args: tuple[object, ...]) -> object:
    """Return the object that a name and its arguments describe."""
    if not isinstance(target, _Global):
        raise TypeError(f"{type(target).__name__} is called")
    if target.name == "copyreg._reconstructor":  # (class, base, state of the base)
        return _built(args[0], ())
    if target.name == "torch._tensor._rebuild_from_type_v2":  # (constructor, subclass of Tensor, arguments, attributes)
        return _built(args[0], cast("tuple[object, ...]", _of(tuple, args[2])))
    constructor = _CONSTRUCTORS.get(target.name)
    plain = tuple(_DTYPES.get(arg.name, Opaque(arg.name)) if isinstance(arg, _Global) else arg for arg in args)
    return Opaque(target.name, plain) if constructor is None else constructor(*plain)


def _paired(items: list[object]) -> dict[object, object]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _of(kind: type, value: object) -> object:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value
