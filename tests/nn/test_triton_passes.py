"""The Triton passes, run by Triton's interpreter, give torch's values and gradients in every dtype, and compile for GPUs.

Triton reads TRITON_INTERPRET as it is imported: processes of their own run here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from shoal.attention.dropout import drop_rows, threshold
from shoal.native import layers as native
from shoal.nn.gpu_passes import compared

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton; here is none")

SAME = """
import torch
from torch.nn import functional as F
from shoal.nn import triton_passes as passes
from shoal.nn.gpu_passes import compared
assert max(compared(torch.device("cpu")).values()) < 1e-5
torch.manual_seed(0)
for dtype, close in ((torch.bfloat16, 2e-2), (torch.float16, 4e-3)):
    x, y, g = torch.randn(3, 300, 40).to(dtype).unbind()  # more rows than programs sum the gradient of a gain
    gain = torch.randn(40).to(dtype)
    leaves = [each.float().requires_grad_() for each in (x, gain)]
    wanted = F.rms_norm(leaves[0], (40,), leaves[1], 1e-6)
    of_x, of_gain = torch.autograd.grad(wanted, leaves, g.float())
    found, rates = passes.rms_norm(x, gain, 1e-6)
    torch.testing.assert_close(found.float(), wanted.detach(), rtol=close, atol=close)
    mine = passes.rms_norm_backward(g, x, gain, rates)
    torch.testing.assert_close(mine[0].float(), of_x, rtol=close, atol=close)
    torch.testing.assert_close(mine[1], of_gain, rtol=1e-4, atol=1e-3)
    leaves = [each.float().requires_grad_() for each in (x, y)]
    wanted = F.silu(leaves[0]) * leaves[1]
    assert passes.swiglu(x, y).dtype == dtype
    torch.testing.assert_close(passes.swiglu(x, y).float(), wanted.detach(), rtol=close, atol=close)
    for got, expected in zip(passes.swiglu_backward(g, x, y), torch.autograd.grad(wanted, leaves, g.float())):
        torch.testing.assert_close(got.float(), expected, rtol=close, atol=close)
print("same")
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shoal.nn import triton_passes as passes
CONSTANTS = {"WIDE": 64, "BACK": True, "DROPPED": 2**31, "ADDS": True}
TYPES = {**dict.fromkeys(("x", "gain", "output", "gradient", "gate", "up", "of_x", "of_gate", "of_up", "residual"), "*bf16"),
         **dict.fromkeys(("rates", "of_gain", "cosines", "sines"), "*fp32"), "keys": "*i32", "eps": "fp32", "kept": "fp32"}
for kernel in (passes._rms_norm, passes._rms_norm_backward, passes._swiglu, passes._swiglu_backward, passes._rotary,
               passes._dropout_add):
    names = kernel.arg_names
    types = {name: "constexpr" if name in CONSTANTS else TYPES.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in CONSTANTS.items() if name in names}
    for capability in (80, 90):
        assert "cubin" in compile(ASTSource(kernel, types, values), target=GPUTarget("cuda", capability, 32)).asm
print("compiled")
"""


def _run(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore::RuntimeWarning", "-c", code], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, **environment})
    return done.stdout or done.stderr


def test_triton_passes_equal_torch() -> None:
    assert _run(SAME, TRITON_INTERPRET="1") == "same\n"


def test_triton_passes_compile_for_a_gpu(tmp_path: Path) -> None:
    assert _run(COMPILED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)) == "compiled\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; here is none")
def test_triton_passes_on_a_gpu_equal_torch() -> None:
    assert max(compared(torch.device("cuda")).values()) < 1e-4


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler; here is none")
def test_native_dropout_drops_what_torch_drops() -> None:
    x, y = torch.randn(2, 10, 24).unbind()
    found = native.dropout_add(x, y, seed=7, threshold=threshold(0.5), kept=2.0)
    assert torch.equal(found, drop_rows(x, y, 0.5, 7))
