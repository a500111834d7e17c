"""The fused passes are what torch's operations make, natively and without native code."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from shoal.errors import UsageError
from shoal.nn import (
    bias_gelu,
    cross_entropy,
    dropout_add_norm,
    dropout_add_norm_with_sum,
    fused,
    passes,
    rms_norm,
    rotary,
    swiglu,
)

LENGTH, DIM = 7, 38


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * torch.cat([cosines, cosines], -1) + torch.cat([-high, low], -1) * torch.cat([sines, sines], -1)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, (DIM,), gain, 1e-6)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "rms_norm": (rms_norm, normed), "swiglu": (swiglu, gated), "rotary": (rotary, rotated)}


def operands(name: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, LENGTH, DIM, dtype=dtype)
    match name:
        case "rms_norm":
            return [x, torch.randn(DIM, dtype=dtype)]
        case "swiglu":
            return [x, torch.randn_like(x)]
        case _:
            angles = torch.randn(LENGTH, DIM // 2, dtype=dtype)
            return [x, angles.cos(), angles.sin()]


@pytest.mark.parametrize("by", ["native", "torch", "bf16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_are_those_of_torch(name: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "torch":
        monkeypatch.setattr(fused.native, "available", lambda: False)
    dtype = torch.bfloat16 if by == "bf16" else torch.float32
    given = operands(name, dtype)
    outcomes: list[list[Tensor]] = []
    for operation in OPERATIONS[name]:
        leaves = [each.clone().requires_grad_(name != "rotary" or index == 0) for index, each in enumerate(given)]
        y = operation(*leaves)
        followed = [each for each in leaves if each.requires_grad]
        outcomes.append([y, *torch.autograd.grad((y * given[0].cos()).sum(), followed)])
    for got, want in zip(*outcomes, strict=True):
        assert got.dtype == dtype
        relative, absolute = (5e-2, 1e-1) if by == "bf16" else (1e-5, 1e-5)
        torch.testing.assert_close(got, want, rtol=relative, atol=absolute)


def norm_operands() -> list[Tensor]:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, LENGTH, DIM).unbind()
    return [x, residual, torch.rand(DIM) + 0.5, torch.randn(DIM), torch.randn(DIM)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("invertible", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_norm_of_a_dropped_sum_is_that_of_its_parts(dropout: float, invertible: bool, biased: bool,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[list[Tensor]] = []
    for served in (True, False):
        if not served:
            monkeypatch.setattr(passes.native, "available", lambda: False)
        x, residual, gain, shift, bias = (each.clone().requires_grad_() for each in norm_operands())
        h, y = dropout_add_norm_with_sum(x, residual, gain, shift, bias=bias if biased else None, dropout=dropout, seed=5,
                                         invertible=invertible)
        alone = dropout_add_norm(x, residual, gain, shift, bias=bias if biased else None, dropout=dropout, seed=5,
                                 invertible=invertible)
        assert torch.equal(alone, y)
        leaves = [x, residual, gain, shift, *([bias] if biased else [])]
        weights = torch.arange(y.numel()).view(y.shape).cos()
        outcomes.append([h, y, *torch.autograd.grad((y * weights).sum() + (h * weights.sin()).sum(), leaves),
                         *torch.autograd.grad((alone * weights).sum(), leaves)])
    for got, want in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_norm_of_16_bits_or_a_broadcast_residual_goes_to_torch() -> None:
    x, residual, gain, shift, bias = norm_operands()
    given = [each.bfloat16() for each in (x, residual, gain, shift, bias)]
    found = dropout_add_norm(*given[:4], bias=given[4])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, F.layer_norm(given[0] + given[4] + given[1], (DIM,), given[2], given[3]))
    torch.testing.assert_close(dropout_add_norm(x, residual[0, 0], gain, shift),
                               F.layer_norm(x + residual[0, 0], (DIM,), gain, shift))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_a_biased_input_is_that_of_torch(approximate: Any) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(64, DIM) * 3, torch.linspace(-20, 20, DIM)[None]])
    leaves = [x.requires_grad_(), torch.linspace(-1, 1, DIM).requires_grad_()]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    mine, want = bias_gelu(leaves[0], leaves[1], approximate=approximate), F.gelu(exact[0] + exact[1],
                                                                                  approximate=approximate)
    torch.testing.assert_close(mine.double(), want, rtol=1e-5, atol=1e-6)
    weights = torch.arange(x.numel()).view(x.shape).cos()
    for got, expected in zip(torch.autograd.grad((mine * weights).sum(), leaves),
                             torch.autograd.grad((want * weights).sum(), exact), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    assert bias_gelu(torch.full((1, 2), torch.nan), torch.zeros(2), approximate=approximate).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.01)])
def test_cross_entropy_is_that_of_torch(dtype: torch.dtype, reduction: Any, smoothing: float, z_loss: float) -> None:
    torch.manual_seed(0)
    logits, targets = (torch.randn(3, LENGTH, DIM) * 30).to(dtype), torch.randint(DIM, (3, LENGTH))
    targets[1, :3] = -7
    a, b = (logits.clone().requires_grad_() for _ in range(2))
    mine = cross_entropy(a, targets, ignore_index=-7, label_smoothing=smoothing, z_loss=z_loss, reduction=reduction)
    flat = b.flatten(0, 1).double()
    losses = F.cross_entropy(flat, targets.flatten(), ignore_index=-7, label_smoothing=smoothing, reduction="none")
    counted = targets.flatten() != -7
    losses = losses + z_loss * flat.logsumexp(-1).square() * counted
    want = {"mean": losses.sum() / counted.sum(), "sum": losses.sum(), "none": losses.view(targets.shape)}[reduction]
    torch.testing.assert_close(mine.double(), want, rtol=1e-5, atol=1e-5)
    found, wanted = (torch.autograd.grad(loss.cos().sum(), leaf)[0] for loss, leaf in ((mine.double(), a), (want, b)))
    assert found.dtype == dtype
    close = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, wanted, rtol=close, atol=close)


def test_gradients_of_two_leaves_accumulate_apart() -> None:
    x, residual, gain, shift, _ = (each.requires_grad_() for each in norm_operands())
    for _ in range(2):
        dropout_add_norm(x, residual, gain, shift).square().sum().backward()
    once = torch.autograd.grad(F.layer_norm(x + residual, (DIM,), gain, shift).square().sum(), x)[0]
    for leaf in (x, residual):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, 2 * once, rtol=1e-4, atol=1e-4)


def test_outputs_of_passes_may_be_written_to_in_place() -> None:
    x, residual, gain, shift, bias = norm_operands()
    y = dropout_add_norm(x.requires_grad_(), residual, gain, shift)
    y.add_(1).sum().backward()
    z = dropout_add_norm(x, residual, gain, shift, invertible=True)  # saves its output
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    bias_gelu(x, bias).mul_(2).sum().backward()


def test_cross_entropy_has_second_derivatives() -> None:
    logits, targets = torch.randn(4, DIM, requires_grad=True), torch.arange(4)
    outcomes: list[Tensor] = []
    for loss in (cross_entropy(logits, targets), F.cross_entropy(logits, targets)):
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        outcomes.append(torch.autograd.grad(first.square().sum(), logits)[0])
    torch.testing.assert_close(*outcomes)
    torch.testing.assert_close(torch.func.grad(lambda z: cross_entropy(z, targets))(logits.detach()),
                               torch.func.grad(lambda z: F.cross_entropy(z, targets))(logits.detach()))


def test_learned_angles_have_gradients() -> None:
    x, angles = torch.randn(2, 3, 8), torch.randn(3, 4, requires_grad=True)
    turned = rotary(x, angles.cos(), angles.sin())
    low, high = x.chunk(2, -1)
    expected = torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)
    torch.testing.assert_close(*(torch.autograd.grad(each.sin().sum(), angles)[0] for each in (turned, expected)))


def test_operands_of_two_dtypes_take_the_wider_one() -> None:
    gate, up = torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(3, 4)
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate.float()) * up)


def test_a_broadcast_residual_is_that_of_whole_rows_with_dropout_too() -> None:
    x, residual, gain, shift = torch.randn(3, 8), torch.randn(8), torch.randn(8), torch.randn(8)
    found = dropout_add_norm(x, residual, gain, shift, dropout=0.5, seed=3)
    torch.testing.assert_close(found, dropout_add_norm(x, residual.expand(3, 8).clone(), gain, shift, dropout=0.5, seed=3))


def test_passes_compile_into_one_graph() -> None:
    x, gain, angles = torch.randn(4, DIM), torch.randn(DIM), torch.randn(4, DIM // 2)

    def all_of_them(x: Tensor) -> Tensor:
        return rotary(swiglu(rms_norm(x, gain), x), angles.cos(), angles.sin())

    compiled: Any = torch.compile(all_of_them, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), all_of_them(x))


def test_cross_entropy_keeps_the_logits_and_serves_a_second_backward() -> None:
    logits = torch.randn(4, DIM, requires_grad=True)
    kept, loss = logits.detach().clone(), cross_entropy(logits, torch.arange(4))
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, logits)[0], first) and torch.equal(logits.detach(), kept)


def test_strided_operands_are_served() -> None:
    x, gain = torch.randn(5, 2, DIM).transpose(0, 1), torch.randn(2 * DIM)[::2]
    torch.testing.assert_close(rms_norm(x, gain), normed(x, gain))


@pytest.mark.parametrize(("call", "words"), [
    (lambda: rms_norm(torch.randn(2, 4), torch.randn(3)), r"the gain is \(4,\)"),
    (lambda: swiglu(torch.randn(2), torch.randn(3)), "both have one shape"),
    (lambda: cross_entropy(torch.randn(2, 4), torch.zeros(3, dtype=torch.long)), r"\(\.\.\., words\) and"),
    (lambda: cross_entropy(torch.randn(2, 4), torch.tensor([0, 4])), "got target 4; targets are 0 to 3"),
    (lambda: cross_entropy(torch.randn(2, 4), torch.zeros(2)), "give ids of words"),
    (lambda: cross_entropy(torch.randn(2, 4), torch.zeros(2, dtype=torch.long, device="meta")), "got targets on meta"),
    (lambda: cross_entropy(torch.randn(2, 4), torch.tensor([0, 1]), label_smoothing=1.5), "lies between 0 and 1"),
    (lambda: bias_gelu(torch.randn(2, 8), torch.randn(1)), r"the bias is \(8,\)"),
    (lambda: dropout_add_norm(torch.randn(1, 8), torch.randn(1, 8), torch.randn(4), torch.randn(8)), r"the gain is \(8,\)"),
    (lambda: dropout_add_norm(torch.randn(1, 8), torch.randn(1, 8), torch.randn(8), torch.randn(8), dropout=1.0),
     "dropout: got 1.0; give a probability"),
    (lambda: cross_entropy(torch.randn(2, 4), torch.tensor([0, 1]), reduction=cast(Any, "max")), "choose mean, sum, none"),
    (lambda: rotary(torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)), r"\(length, dim / 2\)"),
    (lambda: rotary(torch.randn(4), torch.randn(2), torch.randn(2)), r"\(\.\.\., length, dim\)"),
    (lambda: rms_norm(torch.ones(2, 4, dtype=torch.long), torch.ones(4)), "give a floating-point dtype"),
    (lambda: swiglu(torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.long)), "give a floating-point dtype"),
    (lambda: bias_gelu(torch.randn(2, 4), torch.randn(4), approximate=cast(Any, "sigmoid")), "choose none, tanh"),
])  # fmt: skip
def test_operands_that_do_not_fit_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def native_passes() -> list[Tensor]:
    """Return what every native pass makes of fixed operands."""
    torch.manual_seed(0)
    x, gain, angles = torch.randn(LENGTH * 3, DIM), torch.randn(DIM), torch.randn(LENGTH, DIM // 2)
    y, rates = fused.native.rms_norm(x, gain, 1e-6)
    half, logits = fused.native.DropMask(7, 2**31, 2.0), x.clone()
    h, z, means, roots = fused.native.dropout_add_norm(x, gain, y, gain, gain, eps=1e-5, dropout=half, keep_sum=True)
    assert h is not None
    targets = torch.arange(len(x)) % DIM
    return [y, *fused.native.rms_norm_backward(y, x, gain, rates), h, z, means, roots,
            *fused.native.dropout_add_norm_backward(y, x, h, means, roots, gain, gain, half),
            *(fused.native.bias_gelu(x, gain, tanh=tanh) for tanh in (False, True)),
            *(each for tanh in (False, True) for each in fused.native.bias_gelu_backward(y, x, gain, tanh=tanh)),
            fused.native.swiglu(x, y), *fused.native.swiglu_backward(z, x, y),
            *fused.native.cross_entropy(logits, targets, gain.repeat(3)[:len(x)], smoothing=0.1, z_loss=0.1), logits,
            fused.native.rotary(x, angles.cos(), angles.sin(), back=True),
            fused.native.dropout_add(x, y, fused.native.DropMask(3, 2**30, 1.25))]


def test_each_instruction_set_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if COMPILER is None or "avx2" not in flags or not fused.native.available():
        pytest.skip("needs a C++ compiler, and an x86 processor with AVX2")
    source, expected = Path(fused.native.__file__).with_name("layers.cpp"), native_passes()
    for name, chosen in (("avx2", ("-mavx2", "-mfma", "-mno-avx512f")), ("plain", ("-mno-avx",))):
        path = tmp_path / f"{name}.so"
        subprocess.run([COMPILER, "-std=c++17", "-O3", *chosen, "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared",
                        str(source), "-o", str(path)], check=True, timeout=600)
        library = ctypes.CDLL(str(path))
        with monkeypatch.context() as patched:
            patched.setattr(fused.native, "load", lambda _, library=library: library)
            assert all(torch.equal(got, want) for got, want in zip(native_passes(), expected, strict=True)), name


FOLLOWED: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    **{name: (operation, operands(name, torch.float32)) for name, (operation, _) in OPERATIONS.items()},
    "bias_gelu": (bias_gelu, [torch.randn(6, DIM), torch.randn(DIM)]),
    "dropout_add_norm": (partial(dropout_add_norm, dropout=0.2, seed=3), [
        *torch.randn(2, 6, DIM), *torch.randn(2, DIM)]),
    "invertible": (partial(dropout_add_norm, invertible=True), [*torch.randn(2, 6, DIM), torch.rand(DIM) + 1,
                                                                torch.randn(DIM)])}


@pytest.mark.parametrize("name", [*FOLLOWED])
def test_a_pass_is_torchs_operators_under_torch_func(name: str) -> None:
    operation, given = FOLLOWED[name]
    leaf = given[0].clone().requires_grad_()
    want, = torch.autograd.grad(operation(leaf, *given[1:]).square().sum(), leaf)
    got = torch.func.grad(lambda x: operation(x, *given[1:]).square().sum())(given[0])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("name", [*FOLLOWED])
def test_a_traced_pass_computes_from_its_operands(name: str, mode: str) -> None:
    operation, given = FOLLOWED[name]
    graph = make_fx(lambda *given: operation(*given), tracing_mode=mode)(*[torch.zeros_like(each) for each in given])
    torch.testing.assert_close(graph(*given), operation(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*FOLLOWED])
def test_a_pass_takes_no_address_of_a_tensor_without_memory(name: str) -> None:
    operation, given = FOLLOWED[name]
    with FakeTensorMode() as mode:
        assert operation(*map(mode.from_tensor, given)).shape == given[0].shape


def negated(value: Tensor) -> Tensor:
    """Return a view of these values whose memory holds them with the other sign, as `.imag` of a conjugate is."""
    return torch._neg_view(value.neg())


@pytest.mark.parametrize("name", [*FOLLOWED, "cross_entropy"])
def test_lazily_negated_operands_and_gradients_have_their_signs(name: str) -> None:
    operation, given = FOLLOWED.get(name) or (
        lambda x: cross_entropy(x, torch.arange(6), reduction="none"), [torch.randn(6, DIM)])
    results: list[list[Tensor]] = []
    for view in (Tensor.clone, negated):
        leaves = [each.clone().requires_grad_() for each in given]
        output = operation(*(view(leaf) for leaf in leaves))
        output.register_hook(view)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_a_gain_of_another_dtype_is_refused() -> None:
    x, gain = torch.randn(4, DIM), torch.ones(DIM)
    with pytest.raises(UsageError, match=r"dropout_add_norm: got a gain of torch.bfloat16 and a shift of torch.float32"):
        dropout_add_norm(x, x, gain.bfloat16(), gain)
    with pytest.raises(UsageError, match=r"give both in torch.float32$"):
        dropout_add_norm(x, x, gain.half(), gain.half())
    assert dropout_add_norm(x.bfloat16(), x.bfloat16(), gain, gain).dtype == torch.bfloat16
