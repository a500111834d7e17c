"""Fused passes have the second derivatives of torch's operations, or refuse create_graph=True; they never drop a part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.attention import Blocks, attend
from shoal.errors import NotServed
from shoal.nn import TiledLoss, bias_gelu, dropout_add_norm, rms_norm, rotary, swiglu, tiled_cross_entropy
from shoal.nn.passes import drop, dropout_add, dropout_add_norm_with_sum, gelu_linear
from shoal.products import TORCH

ROWS, DIM, WORDS, SEED = 5, 8, 6, 7
Function = Callable[..., Tensor]
ANGLES = torch.arange(ROWS * DIM / 2).view(ROWS, DIM // 2)
TARGETS = torch.tensor([1, 2, -100, 3, 0])


def dropped(x: Tensor, dropout: float) -> Tensor:
    return x * drop(torch.ones(x.shape, dtype=x.dtype), None, dropout, SEED) if dropout else x


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def turned(x: Tensor) -> Tensor:
    cosines, sines, (low, high) = ANGLES.cos().to(x.dtype), ANGLES.sin().to(x.dtype), x.chunk(2, -1)
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], -1)


def both_sums(function: Callable[..., tuple[Tensor, Tensor]]) -> Function:
    def called(*operands: Tensor) -> Tensor:
        first, second = function(*operands)
        return first.square() + second
    return called


def plain_sums(x: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    h = dropped(x + bias, 0.5) + residual
    return h, F.layer_norm(h, (DIM,), gain, shift)


PASSES: dict[str, tuple[Function, Function, str]] = {
    "rms_norm": (rms_norm, normed, "xg"),
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, "xr"),
    "swiglu of one operand": (lambda x: swiglu(x, x), lambda x: F.silu(x) * x, "x"),
    "rotary": (lambda x: rotary(x, ANGLES.cos().to(x.dtype), ANGLES.sin().to(x.dtype)).pow(3),
               lambda x: turned(x).pow(3), "x"),
    "bias_gelu": (bias_gelu, lambda u, bias: F.gelu(u + bias), "xg"),
    "gelu_linear": (
        lambda u, weight, outer, inner: gelu_linear(u, weight, outer, approximate="tanh", products=TORCH, inner_bias=inner),
        lambda u, weight, outer, inner: F.linear(F.gelu(u + inner, approximate="tanh"), weight, outer), "xwog"),
    "dropout_add": (lambda x, residual: dropout_add(x, residual, dropout=0.5, seed=SEED).square(),
                    lambda x, residual: (dropped(x, 0.5) + residual).square(), "xr"),
    "dropout_add_norm": (dropout_add_norm,
                         lambda x, residual, gain, shift: F.layer_norm(x + residual, (DIM,), gain, shift), "xrgs"),
    "dropout_add_norm with its sum": (
        both_sums(lambda x, r, g, s, b: dropout_add_norm_with_sum(x, r, g, s, bias=b, dropout=0.5, seed=SEED)),
        both_sums(plain_sums), "xrgsb"),
    "tiled_cross_entropy": (
        lambda h, weight, bias: tiled_cross_entropy(h, weight, TARGETS, bias, loss=TiledLoss(recompute=True, rows=2)),
        lambda h, weight, bias: F.cross_entropy(F.linear(h, weight, bias), TARGETS), "xwo"),
}
SHAPES = {"x": (ROWS, DIM), "r": (ROWS, DIM), "g": (DIM,), "s": (DIM,), "b": (DIM,), "w": (WORDS, DIM), "o": (WORDS,)}


def penalised(function: Function, operands: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a loss with a penalty on its own gradients."""
    leaves = [each.clone().requires_grad_() for each in operands]
    loss = function(*leaves).square().sum()
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    return list(torch.autograd.grad(loss + torch.stack([each.square().sum() for each in gradients]).sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*PASSES])
def test_a_gradient_penalty_is_that_of_torchs_operations(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fused, plain, letters = PASSES[name]
    operands = [torch.randn(SHAPES[letter], dtype=dtype) for letter in letters]
    for found, expected in zip(penalised(fused, operands), penalised(plain, operands), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("call", [
    lambda x: tiled_cross_entropy(x, torch.randn(WORDS, DIM), TARGETS),
    lambda x: dropout_add_norm(x, x, torch.ones(DIM), torch.zeros(DIM), invertible=True).square().sum(),
    lambda x: attend(*[x.expand(16, DIM)[None, None]] * 3, Blocks.dense(16, 16, 16), backend="gather").square().sum(),
], ids=["tiled loss", "invertible norm", "attention"])
def test_a_pass_without_second_derivatives_refuses_create_graph(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(1 if "expand" in call.__code__.co_names else ROWS, DIM, requires_grad=True)
    with pytest.raises(NotServed, match="has no second derivative, which create_graph=True asks for; "):
        torch.autograd.grad(call(x), x, create_graph=True)
