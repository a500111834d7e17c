"""Every packing backend gives the same bits for all inputs, instruction sets and thread counts."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.native import build
from shoal.native import onebit as native
from shoal.onebit import BLOCK, packed_bytes, packing, reference
from tests.onebit.comparison import DTYPES, INPUTS, SIZES, agree, all_magnitudes, normal, same

pytestmark = pytest.mark.skipif(not native.available(), reason="native code needs a C++ compiler")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("kind", INPUTS)
def test_native_code_gives_the_bits_of_the_reference(kind: str, elements: int, dtype: torch.dtype) -> None:
    assert agree(INPUTS[kind](elements).to(dtype), native)


@given(st.lists(st.floats(width=32), min_size=1, max_size=64), st.integers(1, 200), st.sampled_from(DTYPES))
def test_native_code_gives_the_bits_of_the_reference_for_any_numbers(numbers: list[float], grains: int,
                                                                     dtype: torch.dtype) -> None:
    assert agree(torch.tensor(numbers).repeat(grains * 16)[: grains * 16].to(dtype), native)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype, set_threads: Callable[[int], None]) -> None:
    values = all_magnitudes(60 * BLOCK + 48).to(dtype)
    results = []
    for count in (1, 2, 3, 7):
        set_threads(count)
        packed = torch.empty(packed_bytes(len(values)), dtype=torch.uint8)
        residual, target = values.clone(), normal(len(values))
        native.pack(residual, packed)
        native.unpack(packed, target, factor=0.3, accumulate=True)
        results.append((residual, packed, target))
        assert agree(values, native)
    assert all(same(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these flags are x86's")
@pytest.mark.parametrize("without", ["-mno-avx512f", "-mno-avx512f -mno-avx2", "-mno-avx512f -mno-avx2 -mno-avx"])
def test_bits_do_not_depend_on_the_instruction_set(without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("c++") or shutil.which("g++")} "$@" {without}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    library = build.load.__wrapped__("onebit")
    assert library is not None
    monkeypatch.setattr(native, "load", lambda _: library)
    assert all(agree(make(5 * BLOCK + 208).to(dtype), native) for make in INPUTS.values() for dtype in DTYPES)


def test_the_host_uses_native_code_if_available_else_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = packing._backend.__wrapped__
    assert choose("cpu") is native
    monkeypatch.setattr(native, "load", lambda _: None)
    assert choose("cpu") is reference and choose("meta") is reference
