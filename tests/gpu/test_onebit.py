"""Packing on a GPU, by Triton or by torch, gives the bytes of packing on the host."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from shoal.onebit import is_finite, pack, packed_bytes, packing, reference, unpack
from tests.onebit.comparison import DTYPES, INPUTS, SIZES, agree, normal, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; here is none")]

BACKENDS: dict[str, Callable[[], object]] = {
    "triton": lambda: import_module("shoal.onebit.kernels"), "torch": lambda: reference,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gpu_packs_to_the_bits_of_the_host(backend: str, kind: str, dtype: torch.dtype) -> None:
    if backend == "triton" and find_spec("triton") is None:
        pytest.skip("needs Triton; here is none")
    for elements in SIZES:
        assert agree(INPUTS[kind](elements).to("cuda", dtype), BACKENDS[backend]()), elements


def test_a_gpu_packs_in_triton_where_it_is_installed() -> None:
    backend = packing._backend("cuda")  # torch, with a warning, where Triton finds no C compiler
    assert backend is (import_module("shoal.onebit.kernels") if find_spec("triton") else reference)


def test_the_host_unpacks_a_vector_packed_on_a_gpu() -> None:
    elements = 1_000_000 - 1_000_000 % 16
    values = normal(elements).cuda()
    packed, target = torch.empty(packed_bytes(elements), dtype=torch.uint8, device="cuda"), torch.empty(elements)
    residual = values.clone()
    pack(residual, packed)
    unpack(packed.cpu(), target)
    assert is_finite(packed, elements) and same((values - target.cuda()).cpu(), residual.cpu())
