"""A value is its skeleton and its tensors, and becomes itself again."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.pipeline.value_tree import Skeleton, flatten_tree

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    hidden: Tensor
    steps: int


def again(value: object) -> Any:
    skeleton, tensors = flatten_tree(value, "activations of stage 1")
    return Skeleton(skeleton).build(tensors)


def test_containers_and_objects_come_back_with_their_tensors() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    value = {"a": [one, None, (two, 7, "x")], "pair": Pair(one, two), "output": Output(one, 3),
             "ordered": OrderedDict(z=two)}
    found = again(value)
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
    assert again(value) == value


def test_one_tensor_in_two_places_is_one() -> None:
    one = torch.ones(2)
    _, tensors = flatten_tree((one, [one, torch.ones(2)]), "")
    assert len(tensors) == 2
    found = again((one, [one]))
    assert found[0] is found[1][0]


def test_values_of_one_form_have_one_skeleton() -> None:
    def skeleton(value: object) -> bytes:
        return flatten_tree(value, "")[0]

    assert skeleton({"x": torch.ones(2, 3), "n": 1}) == skeleton({"x": torch.zeros(2, 3), "n": 1})
    others = [torch.ones(3, 2), torch.ones(2, 3).double(), torch.ones(2, 3, requires_grad=True), (torch.ones(2, 3),), None]
    assert len({skeleton(value) for value in [torch.ones(2, 3), *others]}) == 6
    assert skeleton((torch.ones(1), 1)) != skeleton((torch.ones(1), True))


def test_rows_of_tensors_are_told_apart_by_all_that_they_are() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    rows: list[Any] = [x, [x], (x,), [x, y], (x, y), [x, None], [None, x], [x, x], [], (), None, [None], torch.ones(3),
                       torch.ones(2, dtype=torch.float64), torch.ones(1, 2), torch.ones(2, requires_grad=True)]
    skeletons = [flatten_tree(row, "")[0] for row in rows]
    assert len(set(skeletons)) == len(rows)
    assert [flatten_tree(row, "")[0] for row in rows] == skeletons, "remembered or written"
    for row in rows:
        for found in (again(row), again(row)):
            assert type(found) is type(row)
            parts = row if isinstance(row, list | tuple) else [row]
            assert all(a is b for a, b in zip(found if parts is row else [found], parts, strict=True))


def test_a_skeleton_says_how_much_room_each_tensor_takes() -> None:
    value = (nn.Parameter(torch.ones(2)), torch.tensor(True), torch.zeros(0, 3, dtype=torch.bfloat16))
    forms = Skeleton(flatten_tree(value, "")[0]).forms
    assert [(form.shape, form.dtype, form.requires_grad, form.on_host) for form in forms] == [
        ((2,), torch.float32, True, True), ((), torch.bool, False, True), ((0, 3), torch.bfloat16, False, True)]


@pytest.mark.parametrize(("value", "words"), [
    ({"x": torch.ones(1), "hook": [threading.Lock()]}, r"value\['hook'\]\[0\] cannot travel.*_thread.lock"),
    ((1, lambda: 2), r"value\[1\] cannot travel.*lambda"),
    (Output(torch.ones(1), (x for x in ())), "a part of the value cannot travel.*generator"),  # pyright: ignore  on purpose
    ((torch.ones(2, 2).to_sparse(),), r"value\[0\] cannot travel.*layout torch.sparse_coo"),
    (torch.ones(2, device="meta"), "value cannot travel.*on meta"),
    (nn.UninitializedParameter(), "UninitializedParameter"),
])  # fmt: skip
def test_what_cannot_travel_is_named(value: object, words: str) -> None:
    with pytest.raises(UsageError, match="^pipeline, activations of stage 1: .*" + words):
        again(value)
