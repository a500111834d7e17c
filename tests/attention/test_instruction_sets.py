"""The C++ kernel equals the reference with each instruction set that it is written for; threads do not change its bits."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.attention import Blocks
from shoal.attention.attend import kernels_for
from shoal.attention.call import AttentionCall
from shoal.native import attention as native
from tests.attention.test_attend import close, operands, padded, passes, random_blocks

SOURCE = Path(native.__file__).with_name("attention.cpp")
COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
SETS = {"avx2": ("-mavx2", "-mfma", "-mno-avx512f"), "plain": ("-mno-avx",)}
"""Flags on top of the processor's base architecture; the kernel of this processor itself is tested in test_attend."""

Use = Callable[[str], None]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the kernel once for each instruction set that this processor runs."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if COMPILER is None or "avx2" not in flags:
        pytest.skip("needs a C++ compiler, and an x86 processor with AVX2")
    folder = tmp_path_factory.mktemp("kernels")
    built = {name: folder / f"{name}.so" for name in SETS}
    for name, path in built.items():
        subprocess.run([COMPILER, "-std=c++17", "-O1", *SETS[name], "-fno-math-errno", "-ffp-contract=off", "-fPIC",
                        "-shared", "-fopenmp", str(SOURCE), "-o", str(path)], check=True, timeout=600)
    return built


@pytest.fixture
def use(libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Use:
    """Return a function that lets the native backend run the kernel of an instruction set."""
    def chosen(name: str) -> None:
        library = ctypes.CDLL(str(libraries[name]))
        monkeypatch.setattr(native, "load", lambda _: library)
    return chosen


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("block", "dim"), [(16, 40), (48, 64), (64, 128)])
def test_each_instruction_set_equals_the_reference(use: Use, name: str, block: int, dim: int) -> None:
    blocks = random_blocks(4, 5, block)
    tensors = operands(blocks, 4, 2, dim)
    bias = torch.randn(4, blocks.length, blocks.length, generator=torch.Generator().manual_seed(6))
    bias[:, 20:40] = torch.finfo(torch.float32).min  # these rows see nothing
    expected = passes("reference", tensors, blocks, bias=bias, causal=True, dropout=0.2, seed=5,
                      key_padding=padded(2, blocks.length, block))
    use(name)
    close(passes("native", tensors, blocks, bias=bias, causal=True, dropout=0.2, seed=5,
                 key_padding=padded(2, blocks.length, block)), expected)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_each_instruction_set_do_not_depend_on_threads(use: Use, name: str, dtype: torch.dtype) -> None:
    blocks = random_blocks(4, 6, 16)
    tensors = operands(blocks, 4, 2, 32, dtype=dtype)
    use(name)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 9):
            torch.set_num_threads(threads)
            results.append(passes("native", tensors, blocks, dropout=0.1, seed=1))
    finally:
        torch.set_num_threads(before)
    for one, *others in zip(*results, strict=True):
        assert one.dtype == dtype and all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("name", [None, *SETS])
def test_the_log_sum_exp_is_right_to_two_units(use: Use, name: str | None) -> None:
    if name is not None:
        use(name)
    length = 2048
    zeros = torch.zeros(1, 1, length, 16)  # all scores are 0, and row i sees i + 1 keys
    call = AttentionCall(blocks=Blocks.dense(length, length, 64), heads=1, scale=1.0, causal=True, terms=(), biased=False,
                         dropout=0.0, seed=0, hidden=None)
    _, sums = kernels_for("native", call, zeros, zeros, zeros).forward(call, zeros, zeros, zeros)
    exact = torch.arange(1, length + 1, dtype=torch.float64).log()
    assert sums[0, 0, 0] == 0
    assert ((sums[0, 0].double() - exact).abs() <= 2 * 2.0**-24 * 2 ** exact.clamp(min=1e-9).log2().ceil()).all()
