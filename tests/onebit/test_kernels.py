"""The Triton kernels, run by Triton's interpreter, give the bits of the reference (on a GPU: tests/gpu/test_onebit.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# No bf16: the interpreter rounds it differently. It computes in numpy, which warns of every Inf.
CODE = """
import torch
from shoal.onebit import BLOCK, kernels
from tests.onebit.comparison import INPUTS, agree
for kind, make in INPUTS.items():
    for elements in (0, 16, BLOCK - 16, 2 * BLOCK + 208):
        for dtype in (torch.float32, torch.float16):
            assert agree(make(elements).to(dtype), kernels), (kind, elements, dtype)
print("agreed")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton; here is none")
def test_triton_kernels_give_the_bits_of_the_reference() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore::RuntimeWarning", "-c", CODE], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.stdout == "agreed\n", done.stderr
