"""Values with a codec are restored equal and of the same type; other values are rejected with their path."""

import math
from collections import Counter, OrderedDict, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_cases import save, untimed
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint import read
from shoal.checkpoint.values import decode, encode
from shoal.errors import CheckpointError, UsageError

leaves = (st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
          | st.dates() | st.times() | st.datetimes(timezones=st.just(timezone(timedelta(hours=2)))) | st.timedeltas())
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
                      | st.dictionaries(keys, inner, max_size=3) | st.sets(keys) | st.frozensets(keys), max_leaves=8)


class Color(IntEnum):
    RED = 1


class Stateful:
    def state_dict(self) -> dict[str, int]:
        return {}


def same(a: object, b: object) -> bool:
    """Return whether two values are equal and of the same type; nan equals nan."""
    if type(a) is not type(b):
        return False
    match a:
        case dict():
            return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case float():
            return a == b or (math.isnan(a) and math.isnan(b))
        case complex():
            return same(a.real, b.real) and same(a.imag, b.imag)
        case torch.Tensor():
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        case np.ndarray() | np.generic():
            return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        case _:
            return a == b


def round_trip(value: object) -> object:
    encoded = encode(value)
    return decode(encoded.json, lambda at: encoded.tensors[at])


@untimed
@given(values)
def test_plain_values_are_restored_equal_with_the_same_type(value: object) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize("value", [
    torch.arange(6).reshape(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 3), torch.tensor([1 + 2j]),
    torch.tensor([1 + 2j], dtype=torch.complex128), torch.arange(6).reshape(2, 3).T,
    np.arange(6, dtype=">i2").reshape(2, 3), np.float32(1.5), np.array(["a", "bc"]), np.array([], dtype=np.uint32),
    np.datetime64("2024-02-29"), np.bool_(True), np.array(3), np.array([1.5, np.nan]),
    torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), Path("a/b"), OrderedDict(b=1, a=2), Counter("abca"),
    {"$": 1, "x": 2}, bytearray(b"ab"), {1: "a", "1": "b", None: ()} | {(1, 2): {3}},
    date(2024, 2, 29), datetime(2024, 2, 29, 12, fold=1), time(1, 2, 3), timedelta(days=-1), 2**70, math.inf, -0.0,
], ids=repr)
def test_values_beyond_json_are_restored_from_a_checkpoint(tmp_path: Path, value: object) -> None:
    save(tmp_path, "a", {}, shared={"deep": [value]}, private={"own": value})
    with read(tmp_path) as snapshot:
        assert same(snapshot.shared, {"deep": [value]})
        assert same(snapshot.private(0), {"own": value})
        assert snapshot.names() == []


def test_a_parameter_is_restored_as_a_tensor() -> None:
    assert same(round_trip(torch.nn.Parameter(torch.ones(2))), torch.ones(2))


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(("value", "message"), [
    ({"foo": [0, 1, 2, object()]}, "client_state.foo[3]: got builtins.object, which cannot be saved without pickle; "),
    ({"a b": {3: Point(1, 2)}}, "client_state['a b'][3]: got test_checkpoint_values.Point, which"),
    ({"key": {Color.RED: 1}}, "client_state.key.keys()[0]: got test_checkpoint_values.Color, which"),
    ({"rng": np.random.default_rng(0)}, "client_state.rng: got numpy.random._generator.Generator, which"),
    ({"a": np.array([object()])}, "client_state.a: got a numpy array of dtype object, whose elements are objects"),
    ({"a": ["\ud800"]}, "client_state.a[0]: got '\\ud800', which UTF-8 cannot encode"),
    ({"a": {"\ud800": 1}}, "client_state.a.keys(): got '\\ud800', which UTF-8 cannot encode"),
    ({"a": torch.ones(2).to_sparse()}, "client_state.a: got a tensor without plain data (torch.sparse_coo, cpu)"),
    ({"a": torch.ones(2, device="meta")}, "client_state.a: got a tensor without plain data (torch.strided, meta)"),
])
def test_a_value_that_needs_pickle_is_rejected_with_its_path(value: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        encode(value, "client_state")
    assert str(caught.value).startswith(message)


def test_the_error_lists_allowed_types_and_a_fix() -> None:
    with pytest.raises(UsageError, match=r"allowed: None, bool, int, .* timedelta; convert it to one of these"):
        encode(object())
    with pytest.raises(UsageError, match=r"^the value: got .*Stateful, .*; save its state_dict\(\) instead$"):
        encode(Stateful())


def test_a_value_that_contains_itself_is_rejected() -> None:
    loop: list[object] = []
    loop.append({"again": loop})
    with pytest.raises(UsageError, match=r"^state\[0\]\.again: contains itself, which a checkpoint cannot store$"):
        encode(loop, "state")


def test_a_value_shared_by_two_containers_is_not_a_cycle() -> None:
    part = [1]
    assert round_trip([part, part]) == [[1], [1]]


def test_a_codec_of_a_later_version_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"^a value was saved as 'quaternion', which this version of Shoal does not"):
        decode({"$": "quaternion"}, lambda at: torch.zeros(0))


def test_an_unknown_torch_dtype_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"^a tensor was saved as float3, a dtype that torch .* does not have$"):
        decode({"$": "dtype", "text": "float3"}, lambda at: torch.zeros(0))
