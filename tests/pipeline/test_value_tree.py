"""A value is split into its tree spec and its tensors, and is rebuilt from them."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.pipeline.value_tree import TreeSpec, flatten_tree

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    hidden: Tensor
    steps: int


def round_trip(value: object) -> Any:
    spec, tensors = flatten_tree(value, "activations of stage 1")
    return TreeSpec(spec).unflatten(tensors)


def test_containers_and_objects_come_back_with_their_tensors() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    value = {"a": [one, None, (two, 7, "x")], "pair": Pair(one, two), "output": Output(one, 3),
             "ordered": OrderedDict(z=two)}
    found = round_trip(value)
    assert found["a"][0] is one
    assert found["a"][1:] == [None, (two, 7, "x")]
    assert found["pair"] == Pair(one, two)
    assert isinstance(found["output"], Output)
    assert found["output"].hidden is one
    assert list(found["ordered"]) == ["z"]
    assert found is not value


@pytest.mark.parametrize("value", [None, 7, "text", (), {}, [1, {"a": 2.5}]])
def test_a_value_may_have_no_tensors(value: object) -> None:
    assert flatten_tree(value, "")[1] == []
    assert round_trip(value) == value


def test_a_tensor_in_two_places_is_flattened_once() -> None:
    one = torch.ones(2)
    _, tensors = flatten_tree((one, [one, torch.ones(2)]), "")
    assert len(tensors) == 2
    found = round_trip((one, [one]))
    assert found[0] is found[1][0]


def test_values_of_equal_structure_and_shapes_have_equal_tree_specs() -> None:
    def spec(value: object) -> bytes:
        return flatten_tree(value, "")[0]

    assert spec({"x": torch.ones(2, 3), "n": 1}) == spec({"x": torch.zeros(2, 3), "n": 1})
    others = [torch.ones(3, 2), torch.ones(2, 3).double(), torch.ones(2, 3, requires_grad=True), (torch.ones(2, 3),), None]
    assert len({spec(value) for value in [torch.ones(2, 3), *others]}) == 6
    assert spec((torch.ones(1), 1)) != spec((torch.ones(1), True))


def test_cached_tree_specs_differ_in_every_property_of_the_tensors() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    rows: list[Any] = [x, [x], (x,), [x, y], (x, y), [x, None], [None, x], [x, x], [], (), None, [None], torch.ones(3),
                       torch.ones(2, dtype=torch.float64), torch.ones(1, 2), torch.ones(2, requires_grad=True)]
    specs = [flatten_tree(row, "")[0] for row in rows]
    assert len(set(specs)) == len(rows)
    assert [flatten_tree(row, "")[0] for row in rows] == specs, "cached or pickled"
    for row in rows:
        for found in (round_trip(row), round_trip(row)):
            assert type(found) is type(row)
            parts = row if isinstance(row, list | tuple) else [row]
            assert all(a is b for a, b in zip(found if parts is row else [found], parts, strict=True))


def test_a_tree_spec_tells_the_receiver_what_to_allocate() -> None:
    value = (nn.Parameter(torch.ones(2)), torch.tensor(True), torch.zeros(0, 3, dtype=torch.bfloat16))
    metas = TreeSpec(flatten_tree(value, "")[0]).metas
    assert [(meta.shape, meta.dtype, meta.requires_grad, meta.on_host) for meta in metas] == [
        ((2,), torch.float32, True, True), ((), torch.bool, False, True), ((0, 3), torch.bfloat16, False, True)]


@pytest.mark.parametrize(("value", "words"), [
    ({"x": torch.ones(1), "hook": [threading.Lock()]}, r"value\['hook'\]\[0\] cannot be sent.*_thread.lock"),
    ((1, lambda: 2), r"value\[1\] cannot be sent.*lambda"),
    (Output(torch.ones(1), (x for x in ())), "a part of the value cannot be sent.*generator"),  # pyright: ignore  on purpose
    ((torch.ones(2, 2).to_sparse(),), r"value\[0\] cannot be sent.*layout torch.sparse_coo"),
    (torch.ones(2, device="meta"), "value cannot be sent.*on meta"),
    (nn.UninitializedParameter(), "UninitializedParameter"),
])  # fmt: skip
def test_a_part_that_cannot_be_sent_is_named(value: object, words: str) -> None:
    with pytest.raises(UsageError, match="^pipeline, activations of stage 1: .*" + words):
        round_trip(value)
