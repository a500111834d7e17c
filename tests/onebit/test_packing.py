"""The packed format byte by byte, the residual, and that error feedback sends everything in the end."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.onebit import BLOCK, difference, is_finite, pack, packed_bytes, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (16, BLOCK - 16, BLOCK, BLOCK + 16, 5 * BLOCK + 208)


def empty_packed(elements: int) -> Tensor:
    return torch.full((packed_bytes(elements),), 0xAB, dtype=torch.uint8)


def packed_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed vector and the residual."""
    residual, packed = values.clone(), empty_packed(values.numel())
    pack(residual, packed)
    return packed, residual


def unpacked(packed: Tensor, elements: int) -> Tensor:
    target = torch.empty(elements)
    unpack(packed, target)
    return target


def random(elements: int, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


# Layout


def test_a_vector_is_packed_to_exactly_these_bytes() -> None:
    values = torch.zeros(BLOCK + 32)
    values[0], values[3], values[9] = -3.0, 5.0, -8.0
    values[BLOCK:] = torch.tensor([1.0, -3.0] * 16)
    packed, residual = packed_of(values)
    first, second = 16 / 2048, 2.0
    scales = struct.pack("<2f", first, second)
    signs = bytes([0b11111110, 0b11111101]) + b"\xff" * 254 + b"\x55" * 4
    assert bytes(packed.tolist()) == scales + signs + bytes(4)
    assert residual[[0, 1, 3, 9]].tolist() == [-3 + first, -first, 5 - first, -8 + first]
    assert residual[BLOCK:].tolist() == [-1.0, -1.0] * 16


@pytest.mark.parametrize(("elements", "size"), [(0, 0), (16, 16), (96, 16), (112, 32), (BLOCK, 272), (BLOCK + 16, 272),
                                               (30_000_000 - 30_000_000 % 16, 3_808_608)])  # fmt: skip
def test_packed_bytes_are_a_bit_an_element_and_a_scale_a_block(elements: int, size: int) -> None:
    assert packed_bytes(elements) == size == math.ceil((elements / 8 + 4 * math.ceil(elements / BLOCK)) / 16) * 16


def test_a_length_that_is_no_multiple_of_16_is_refused() -> None:
    with pytest.raises(AssertionError, match="17 elements are no multiple of 16"):
        packed_bytes(17)


def test_both_zeros_have_the_sign_bit_of_positive_numbers() -> None:
    packed, _ = packed_of(torch.tensor([0.0, -0.0, 1e-45, -1e-45] * 4))
    assert packed[4:].tolist() == [0b01110111] * 2 + [0] * 10


# The decoded vector and the residual


@pytest.mark.parametrize("elements", SIZES)
def test_decoded_plus_residual_is_the_vector_where_nothing_rounds(elements: int) -> None:
    values = random(elements).mul(8).round()  # sums of integers are exact; means have 11 bits more
    values[values.numel() // BLOCK * BLOCK :] = 4.0
    packed, residual = packed_of(values)
    assert torch.equal(unpacked(packed, elements) + residual, values)
    for block, left in zip(values.split(BLOCK), residual.split(BLOCK), strict=True):
        assert torch.equal(block - left, torch.where(block >= 0, block.abs().mean(), -block.abs().mean()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_rounded_once_to_the_dtype_of_the_vector(dtype: torch.dtype) -> None:
    values = random(3 * BLOCK + 48).to(dtype)
    packed, residual = packed_of(values)
    assert residual.dtype == dtype
    assert torch.equal(residual, (values.float() - unpacked(packed, values.numel())).to(dtype))


@given(st.lists(st.floats(-(2.0**50), 2.0**50, width=32), min_size=1, max_size=4), st.sampled_from(SIZES),
       st.integers(0, 1000))
def test_the_residual_is_a_contraction_of_the_vector(peaks: list[float], elements: int, seed: int) -> None:
    values = random(elements, seed)
    for index, peak in enumerate(peaks):
        values[index * 5 % elements] = peak
    _, residual = packed_of(values)
    for block, left in zip(values.double().split(BLOCK), residual.double().split(BLOCK), strict=True):
        whole = block.square().sum()
        bound = whole - block.abs().sum().square() / len(block)
        assert left.square().sum() <= bound + 1e-5 * whole


@pytest.mark.parametrize("elements", SIZES)
def test_error_feedback_sends_everything_in_the_end(elements: int) -> None:
    error, inputs, outputs = torch.zeros(elements), torch.zeros(elements).double(), torch.zeros(elements).double()
    for step in range(50):
        vector = random(elements, step)
        error += vector
        packed = empty_packed(elements)
        pack(error, packed)
        inputs += vector
        outputs += unpacked(packed, elements)
    torch.testing.assert_close(outputs, inputs - error, rtol=0, atol=1e-4)
    assert error.norm() < 3 * vector.norm()  # bounded, not growing with the 50 steps


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_follows_its_master_by_packed_differences_alone(dtype: torch.dtype) -> None:
    elements = 2 * BLOCK + 16
    master, weight = random(elements), random(elements, 1).to(dtype)
    before = (master - weight).norm()
    for _ in range(40):
        packed = empty_packed(elements)
        untouched = master.clone(), weight.clone()
        difference(master, weight, packed)
        assert torch.equal(master, untouched[0]) and torch.equal(weight, untouched[1])
        expected = empty_packed(elements)
        pack(master - weight.float(), expected)
        assert torch.equal(packed, expected)
        unpack(packed, weight, accumulate=True)
    assert (master - weight).norm() < 0.1 * before


# Unpacking


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3, -2.0])
def test_unpack_writes_or_adds_a_multiple_rounded_once(dtype: torch.dtype, factor: float) -> None:
    elements = 3 * BLOCK + 48
    packed, _ = packed_of(random(elements))
    multiple = torch.tensor(factor) * unpacked(packed, elements)
    target = random(elements, 7).to(dtype)
    added = target.clone()
    unpack(packed, added, factor=factor, accumulate=True)
    assert torch.equal(added, (target.float() + multiple).to(dtype))
    unpack(packed, target, factor=factor)
    assert torch.equal(target, multiple.to(dtype))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_block_has_the_scale_nan_and_no_residual(bad: float, dtype: torch.dtype) -> None:
    elements = 3 * BLOCK + 48
    values = random(elements).to(dtype)
    clean, clean_residual = packed_of(values)
    values[BLOCK + 77] = bad
    packed, residual = packed_of(values)
    scales, expected = packed[:16].view(torch.float32), clean[:16].view(torch.float32)
    assert is_finite(clean, elements) and not is_finite(packed, elements)
    assert scales[1].view(torch.int32).item() == 0x7FC00000 and torch.equal(scales[[0, 2, 3]], expected[[0, 2, 3]])
    assert torch.equal(residual[BLOCK : 2 * BLOCK], torch.zeros(BLOCK, dtype=dtype))
    for finite in (slice(BLOCK), slice(2 * BLOCK, None)):
        assert torch.equal(residual[finite], clean_residual[finite])
    assert unpacked(packed, elements)[BLOCK : 2 * BLOCK].isnan().all()


def test_a_block_whose_sum_overflows_is_not_finite() -> None:
    packed, residual = packed_of(torch.full((BLOCK,), 3e38))
    assert not is_finite(packed, BLOCK) and not residual.any()


def test_an_empty_vector_packs_to_zero_bytes() -> None:
    packed, _ = packed_of(torch.empty(0))
    unpack(packed, torch.empty(0))
    assert packed.numel() == 0 and is_finite(packed, 0)


def test_vectors_of_a_wrong_shape_dtype_or_alignment_are_refused() -> None:
    values = random(64)
    with pytest.raises(AssertionError, match="64 elements are packed in 16 bytes"):
        pack(values, torch.empty(32, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="not a flat vector"):
        pack(values.view(8, 8), empty_packed(64))
    with pytest.raises(AssertionError, match="not a flat vector"):
        pack(values.double(), empty_packed(64))
    with pytest.raises(AssertionError, match="masters are fp32"):
        difference(values.half(), values, empty_packed(64))
    with pytest.raises(AssertionError, match="not be aligned"):
        pack(values, torch.empty(17, dtype=torch.uint8)[1:])
