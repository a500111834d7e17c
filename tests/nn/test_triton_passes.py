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
from shoal.attention.dropout import drop_rows, threshold
from shoal.native.layers import DropMask
from shoal.nn import triton_passes as passes
from shoal.nn.gpu_passes import compared
assert max(compared(torch.device("cpu")).values()) < 1e-5
torch.manual_seed(0)
passes._PROGRAMS = 16
for dtype, close in ((torch.bfloat16, 2e-2), (torch.float16, 4e-3)):
    x, y, g = torch.randn(3, 36, 40).to(dtype).unbind()  # more rows than programs sum the gradient of a gain
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
    bias, half, plain = torch.randn(40).to(dtype), DropMask(7, threshold(0.5), 2.0), DropMask(0, 0, 1.0)
    for dropout, inverts in ((half, True), (plain, False)):
        leaves = [each.float().requires_grad_() for each in (x, bias, y, gain, bias)]
        share = drop_rows(torch.ones(36, 40), None, 0.5, 7) if dropout is half else 1
        h = (leaves[0] + leaves[1]) * share + leaves[2]
        wanted = F.layer_norm(h, (40,), leaves[3], leaves[4], 1e-6)
        gradients = torch.autograd.grad((wanted, h), leaves, (g.float(), y.float()))
        mine, normed, means, rates = passes.dropout_add_norm(x, bias, y, gain, bias, eps=1e-6, dropout=dropout,
                                                             keep_sum=True)
        torch.testing.assert_close(mine.float(), h.detach(), rtol=close, atol=close)
        torch.testing.assert_close(normed.float(), wanted.detach(), rtol=close, atol=2 * close)
        if not inverts:  # from rounded outputs the gradient of a small gain is far off: fp32 is compared above
            of_x, of_y, others = passes.dropout_add_norm_backward(g, y, mine, means, rates, gain, bias, dropout)
            for got, expected in zip((of_x, of_y), (gradients[0], gradients[2])):
                torch.testing.assert_close(got.float(), expected, rtol=close, atol=2 * close)
            torch.testing.assert_close(others, torch.stack([gradients[3], gradients[4], gradients[1]]), rtol=close, atol=0.3)
    for tanh in (True, False):
        leaves = [each.float().requires_grad_() for each in (x, bias)]
        wanted = F.gelu(leaves[0] + leaves[1], approximate="tanh" if tanh else "none")
        torch.testing.assert_close(passes.bias_gelu(x, bias, tanh=tanh).float(), wanted.detach(), rtol=close, atol=close)
        of_x, of_bias = torch.autograd.grad(wanted, leaves, g.float())
        found = passes.bias_gelu_backward(g, x, bias, tanh=tanh)
        torch.testing.assert_close(found[0].float(), of_x, rtol=close, atol=close)
        torch.testing.assert_close(found[1], of_bias, rtol=1e-3, atol=1e-2)
    passes._TILE = 16  # several tiles a row
    for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.01)):
        leaf = x.float().requires_grad_()
        targets = torch.arange(36) % 40
        losses = F.cross_entropy(leaf, targets, label_smoothing=smoothing, reduction="none")
        losses = losses + z_loss * leaf.logsumexp(-1).square()
        losses = losses * (torch.arange(36) % 3 > 0)
        (of_logits,) = torch.autograd.grad(losses, leaf, y[:, 0].float())
        logits = x.clone()
        hidden = targets.masked_fill(torch.arange(36) % 3 == 0, -1)
        mine, _ = passes.cross_entropy(logits, hidden, y[:, 0].float(), smoothing=smoothing, z_loss=z_loss)
        torch.testing.assert_close(mine, losses.detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits.float(), of_logits, rtol=close, atol=close)
print("same")
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shoal.nn import triton_passes as passes
CONSTANTS = {"WIDE": 64, "BACK": True, "DROPPED": 2**31, "ADDS": True, "BIASED": True, "SUMMED": True, "INVERTS": True,
             "TANH": False, "DIFFERENTIATES": True}
TYPES = {**dict.fromkeys(("x", "gain", "output", "gradient", "gate", "up", "of_x", "of_gate", "of_up", "residual", "bias",
                          "shift", "sums", "of_y", "of_h", "held", "of_residual", "logits"), "*bf16"),
         **dict.fromkeys(("rates", "of_gain", "cosines", "sines", "means", "partial", "of_bias", "scales", "losses"),
                         "*fp32"),
         **dict.fromkeys(("eps", "kept", "smoothing", "z_loss"), "fp32"), "keys": "*i32", "targets": "*i64"}
for kernel in (passes._rms_norm, passes._rms_norm_backward, passes._swiglu, passes._swiglu_backward, passes._rotary,
               passes._dropout_add, passes._dropout_add_norm, passes._dropout_add_norm_backward, passes._bias_gelu,
               passes._bias_gelu_backward, passes._cross_entropy):
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
    found = native.dropout_add(x, y, native.DropMask(7, threshold(0.5), 2.0))
    assert torch.equal(found, drop_rows(x, y, 0.5, 7))
