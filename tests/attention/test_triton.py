"""The Triton kernels, run by Triton's interpreter, give the reference's output and gradients, and compile for GPUs.

tests/gpu/test_attention.py runs them on a GPU. Triton reads TRITON_INTERPRET as it is imported: processes of their own run
here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from shoal.attention import Blocks, attend
from shoal.errors import UsageError

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton; here is none")

# The interpreter computes in numpy, which warns of every Inf.
SAME = """
import torch
from torch.autograd.graph import saved_tensors_hooks
from shoal.attention import Blocks, attend
from tests.attention.test_attend import CASES, close, operands, passes, random_blocks
from tests.attention.test_saved_tensors import restrided
for case, options in CASES.items():
    for block, kv_heads, dim, layout_heads in ((16, 2, 24, 4), (32, 4, 16, 1))[:1 + (case == "plain")]:
        blocks = random_blocks(layout_heads, 3, block)
        tensors = operands(blocks, 4, kv_heads, dim)
        given = {name: value(2, blocks.length, block) if callable(value) else value for name, value in options.items()}
        close(passes("triton", tensors, blocks, **given), passes("reference", tensors, blocks, **given))
blocks = Blocks.dense(32, 32, 16)
windows = torch.randn(1, 1, 32 + 47).unfold(-1, 48, 1)  # (1, 1, 32, 48) of memory that overlaps
key, value = torch.randn(2, 1, 1, 32, 48)
close(*([attend(windows, key, value, blocks, backend=backend)] for backend in ("triton", "reference")))
blocks = random_blocks(4, 3, 16)
tensors = operands(blocks, 4, 4, 16)
given = {"bias": torch.randn(4, blocks.length, blocks.length), "mask": torch.rand(blocks.length, blocks.length) > 0.1}
with saved_tensors_hooks(lambda tensor: tensor, restrided):
    moved = passes("triton", tensors, blocks, **given)
close(moved, passes("reference", tensors, blocks, **given))
blocks = random_blocks(1, 3, 16)
tensors = operands(blocks, 2, 2, 16, dtype=torch.float16)
wide = passes("reference", [each.float() for each in tensors], blocks, dropout=0.2, seed=5)
close([each.float() for each in passes("triton", tensors, blocks, dropout=0.2, seed=5)], wide, tolerance=2e-2)
print("same")
"""

PARTS = """
import torch
from shoal.attention import Blocks
from shoal.attention.attend import kernels_for
from shoal.attention.call import AttentionCall
from tests.attention.test_attend import close, operands, random_blocks
layout = random_blocks(2, 3, 16).layout
rows, columns = torch.tensor([[4, 1, 3]] * 2), torch.tensor([[0, 2, 4]] * 2)
part = Blocks(layout, 16, row_places=rows, column_places=columns)
query, key, value = operands(part, 2, 2, 16)
hidden = torch.zeros(2, 1, 5, dtype=torch.bool)
hidden[1, :, 2] = True
call = AttentionCall(blocks=part, heads=2, scale=0.25, causal=True, terms=(), biased=False, dropout=0.3, seed=11,
                     hidden=hidden, first_head=2)
results = []
for backend in ("triton", "native"):
    kernels = kernels_for(backend, call, query, key, value)
    output, sums = kernels.forward(call, query, key, value)
    results.append([output, sums.masked_fill(sums == -torch.inf, 0),
                    *kernels.backward(call, query, key, value, output, sums, key, score_gradient=None)])
close(*results)
print("same")
"""

COMPILED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shoal.attention import triton_kernels as kernels
CONSTANTS = {"BLOCK": 16, "DIM": 40, "WIDE": 64, "CAUSAL": True, "HIDDEN": True, "TERMS": 3, "MULTIPLIES": 2,
             "DROPPED": 2**32 - 1, "SHARED": False, "SCORES": True}
TYPES = {**dict.fromkeys(("query", "key", "value", "gradient", "output"), "*bf16"), "scale": "fp32", "kept": "fp32",
         **dict.fromkeys(("starts", "numbers", "others", "row_places", "column_places", "keys"), "*i32"),
         **dict.fromkeys(("sums", "inner_products", "score_gradient", "to_query", "to_key", "to_value", "term0"), "*fp32"),
         **dict.fromkeys(("hidden", "term1"), "*u8"), "term2": "*bf16"}
for kernel in (kernels._forward, kernels._to_query, kernels._to_key_and_value):
    names = kernel.arg_names
    types = {name: "constexpr" if name in CONSTANTS else TYPES.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in CONSTANTS.items() if name in names}
    built = compile(ASTSource(kernel, types, values), target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert "cubin" in built.asm
print("compiled")
"""


def _run(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore::RuntimeWarning", "-c", code], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, **environment})
    return done.stdout or done.stderr


@needs_triton
def test_triton_equals_the_reference() -> None:
    assert _run(SAME, TRITON_INTERPRET="1") == "same\n"


@needs_triton
def test_triton_computes_parts_of_a_layout_by_their_places() -> None:
    assert _run(PARTS, TRITON_INTERPRET="1") == "same\n"


@needs_triton
def test_triton_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    assert _run(COMPILED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)) == "compiled\n"


@pytest.mark.parametrize(("block", "dim", "message"), [(48, 64, "got block 48"), (64, 80, "got block 64, head dims 80")])
def test_triton_says_what_it_does_not_serve(block: int, dim: int, message: str) -> None:
    query = torch.zeros(1, 1, block, dim)
    with pytest.raises(UsageError, match=message):
        attend(query, query, query, Blocks.dense(block, block, block), backend="triton")


def test_triton_on_the_host_says_how_to_run_it() -> None:
    query = torch.zeros(1, 1, 16, 16)
    with pytest.raises(UsageError, match="not installed" if find_spec("triton") is None else "does not compile for cpu"):
        attend(query, query, query, Blocks.dense(16, 16, 16), backend="triton")
