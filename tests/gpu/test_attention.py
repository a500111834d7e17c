"""On a GPU every backend gives the reference's output and gradients, and `auto` takes Triton where it serves."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from shoal.attention.attend import attend
from tests.attention.test_attend import CASES, close, operands, passes, random_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; here is none")]


def _on_gpu(value: Any) -> Any:
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("backend", ["gather", "triton", "flex"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("block", "kv_heads", "dim", "layout_heads"), [(16, 2, 32, 4), (32, 1, 16, 1), (64, 4, 64, 4)])
def test_backends_on_a_gpu_equal_the_reference(backend: str, case: str, block: int, kv_heads: int, dim: int,
                                               layout_heads: int) -> None:
    if backend == "triton" and find_spec("triton") is None:
        pytest.skip("needs Triton; here is none")
    options = {name: _on_gpu(value(2, 5 * block, block) if callable(value) else value)
               for name, value in CASES[case].items()}
    if backend == "flex" and ("dropout" in options or "bias" in options):
        pytest.skip("flex has no dropout and no bias")
    blocks = random_blocks(layout_heads, 5, block)
    tensors = [each.cuda() for each in operands(blocks, 4, kv_heads, dim)]
    close(passes(backend, tensors, blocks, **options), passes("reference", tensors, blocks, **options), tolerance=2e-4)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton; here is none")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_takes_triton(dtype: torch.dtype) -> None:
    blocks = random_blocks(1, 5, 64)
    tensors = [each.cuda() for each in operands(blocks, 2, 2, 64, dtype=dtype)]
    assert torch.equal(attend(*tensors, blocks), attend(*tensors, blocks, backend="triton"))
