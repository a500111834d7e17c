"""RMSNorm, SwiGLU and rotary embedding are what torch's operations make, natively and without native code."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import UsageError
from shoal.nn import fused, rms_norm, rotary, swiglu

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


def test_strided_operands_are_served() -> None:
    x, gain = torch.randn(5, 2, DIM).transpose(0, 1), torch.randn(2 * DIM)[::2]
    torch.testing.assert_close(rms_norm(x, gain), normed(x, gain))


@pytest.mark.parametrize(("call", "words"), [
    (lambda: rms_norm(torch.randn(2, 4), torch.randn(3)), r"the gain is \(4,\)"),
    (lambda: swiglu(torch.randn(2), torch.randn(3)), "both have one shape"),
    (lambda: rotary(torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)), r"\(length, dim / 2\)"),
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
    return [y, *fused.native.rms_norm_backward(y, x, gain, rates),
            fused.native.rotary(x, angles.cos(), angles.sin(), back=True),
            fused.native.dropout_add(x, y, seed=3, threshold=2**30, kept=1.25)]


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
