"""A GPU packs to the bytes of the host, in Triton where it is and in torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from shoal.onebit import is_finite, pack, packed_bytes, packing, plain, unpack
from tests.onebit.alike import DTYPES, INPUTS, SIZES, agree, normal, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; here is none")]

WAYS: dict[str, Callable[[], object]] = {"triton": lambda: import_module("shoal.onebit.kernels"), "torch": lambda: plain}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_gpu_gives_the_bits_of_the_host(way: str, kind: str, dtype: torch.dtype) -> None:
    if way == "triton" and find_spec("triton") is None:
        pytest.skip("needs Triton; here is none")
    for elements in SIZES:
        assert agree(INPUTS[kind](elements).to("cuda", dtype), WAYS[way]()), elements


def test_a_gpu_packs_in_triton_where_it_is() -> None:
    chosen = packing._way("cuda")  # but with a warning where Triton finds no C compiler
    assert chosen is (import_module("shoal.onebit.kernels") if find_spec("triton") else plain)


def test_what_a_gpu_packed_the_host_unpacks() -> None:
    elements = 1_000_000 - 1_000_000 % 16
    values = normal(elements).cuda()
    packed, target = torch.empty(packed_bytes(elements), dtype=torch.uint8, device="cuda"), torch.empty(elements)
    rest = values.clone()
    pack(rest, packed)
    unpack(packed.cpu(), target)
    assert is_finite(packed, elements) and same((values - target.cuda()).cpu(), rest.cpu())
