"""A global tensor and its slices give each other, for any sizes, fused tensors and padding."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.mesh.tensor_slice import (
    Segment,
    SlicedModule,
    TensorSlice,
    cuts_of,
    divided,
    slice_of,
    stretch,
    whole,
)


def numbered(dim: int, size: int) -> Tensor:
    shape = [2, 3]
    shape[dim] = size
    return torch.arange(2 * 3 * size)[:shape[0] * shape[1]].view(shape).float() + 1


@given(ranks=some.integers(1, 5), shares=some.lists(some.integers(0, 4), min_size=1, max_size=4), dim=some.integers(0, 1))
def test_slices_of_fused_tensors_and_the_whole_give_each_other(ranks: int, shares: list[int], dim: int) -> None:
    sizes = [ranks * share for share in shares]
    cuts = [TensorSlice.even(dim, sizes, rank, ranks) for rank in range(ranks)]
    tensor = numbered(dim, sum(sizes))
    parts = [slice_of(tensor, cut) for cut in cuts]
    assert torch.equal(whole(parts, cuts), tensor)
    for rank, (cut, part) in enumerate(zip(cuts, parts, strict=True)):
        assert cut.shape(part.shape) == tensor.shape
        pieces = [piece.chunk(ranks, dim)[rank] for piece in tensor.split(sizes, dim) if piece.shape[dim]]
        assert torch.equal(part, torch.cat(pieces, dim) if pieces else part[:])


@given(ranks=some.integers(1, 6), size=some.integers(1, 20), dim=some.integers(0, 1))
def test_padding_is_zero_and_is_not_in_the_whole(ranks: int, size: int, dim: int) -> None:
    cuts = [TensorSlice.padded(dim, size, rank, ranks) for rank in range(ranks)]
    extent = -(-size // ranks)
    tensor = numbered(dim, size)
    parts = [slice_of(tensor, cut, extent=extent) for cut in cuts]
    assert {part.shape[dim] for part in parts} == {extent}
    assert sum(int((part == 0).sum()) for part in parts) == (ranks * extent - size) * tensor.shape[1 - dim]
    assert torch.equal(whole(parts, cuts), tensor)
    assert [row for rank in range(ranks) for row in stretch(size, rank, ranks)] == list(range(size))


def test_a_fused_projection_is_sliced_within_each_of_its_tensors() -> None:
    cut = TensorSlice.even(0, (4, 2, 2), 1, 2)
    assert cut.segments == (Segment(source=2, target=0, length=2), Segment(source=5, target=2, length=1),
                            Segment(source=7, target=3, length=1))
    assert cut.shape((4, 8)) == (8, 8)


def test_parts_of_different_tensors_are_refused() -> None:
    cut = TensorSlice.even(0, (4,), 0, 2)
    with pytest.raises(UsageError, match=r"not make one tensor: their rows along the sliced dim are \[\(0, 2\), \(0, 2\)\]"):
        whole([torch.zeros(2, 3)] * 2, [cut, cut])
    with pytest.raises(UsageError, match="do not make one tensor"):
        whole([torch.zeros(2, 3), torch.zeros(2, 4)], [cut, TensorSlice.even(0, (4,), 1, 2)])


def test_an_indivisible_size_error_lists_sizes_that_divide() -> None:
    assert divided("12 heads", 12, 4) == 3
    with pytest.raises(UsageError, match=r"^14 heads cannot be divided over 4 tensor ranks; make it a multiple of 4 "
                                         r"\(12 or 16\), or use a number of ranks that divides 14: 1, 2, 7, 14$"):
        divided("14 heads", 14, 4)


class HalfSlicedLinear(nn.Module):
    def __init__(self, cut: TensorSlice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.scale = nn.Parameter(torch.zeros(3))
        self.cut = cut

    def cuts(self) -> Mapping[str, TensorSlice]:
        return {"weight": self.cut}


class Holder(nn.Module):
    def __init__(self, cut: TensorSlice, other: TensorSlice) -> None:
        super().__init__()
        self.first, self.second = HalfSlicedLinear(cut), HalfSlicedLinear(other)
        self.second.weight = self.bias = self.first.weight


def test_tied_parameters_have_their_slice_under_every_name() -> None:
    cut = TensorSlice.even(0, (4,), 1, 2)
    assert isinstance(HalfSlicedLinear(cut), SlicedModule)
    assert cuts_of(HalfSlicedLinear(cut)) == {"weight": cut}
    assert cuts_of(Holder(cut, cut)) == {"bias": cut, "first.weight": cut, "second.weight": cut}
    assert cuts_of(nn.Linear(2, 2)) == {}


def test_tied_parameters_with_different_slices_are_refused() -> None:
    with pytest.raises(UsageError, match=r"second.weight and first.weight are one parameter, and are sliced differently"):
        cuts_of(Holder(TensorSlice.even(0, (4,), 1, 2), TensorSlice.padded(0, 3, 1, 2)))
