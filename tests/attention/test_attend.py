"""Every backend gives the reference's output and gradients: layouts, masks, biases, dropout, head groups, odd head dims."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import functional as F

from shoal.attention import (
    BigBirdSparsityConfig,
    Blocks,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    VariableSparsityConfig,
    attend,
)
from shoal.attention.attend import BACKENDS
from shoal.attention.blocks import _of_content
from shoal.attention.call import HIDES
from shoal.errors import UsageError
from shoal.native import attention as native
from shoal.testing import run_ranks

FAST = ("gather", "native")
TOLERANCE = 2e-5


def random_blocks(heads: int, blocks: int, block: int, *, seed: int = 0, empty: bool = True) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    layout = torch.rand(heads, blocks, blocks, generator=generator) < 0.5
    layout[:, :, 0] = True
    if empty:
        layout[:, 2] = False
    return Blocks.of(layout, block)


def operands(blocks: Blocks, heads: int, kv_heads: int, dim: int, *, batches: int = 2, dtype: torch.dtype = torch.float32,
             seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, blocks.length), (kv_heads, blocks.kv_length), (kv_heads, blocks.kv_length))
    return [torch.randn(batches, *shape, dim, generator=generator).to(dtype) for shape in shapes]


def passes(backend: Any, tensors: list[Tensor], blocks: Blocks, bias: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Return the output, and the gradients of all operands."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    bias = None if bias is None else bias.clone().requires_grad_()
    output = attend(*leaves, blocks, bias=bias, backend=backend, **options)
    gradient = torch.randn(output.shape, dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(9))
    output.backward(gradient.to(output))
    result = [output.detach(), *(each.grad for each in leaves), *([] if bias is None else [bias.grad])]
    assert all(each is not None for each in result)
    return [each for each in result if each is not None]


def close(got: list[Tensor], expected: list[Tensor], tolerance: float = TOLERANCE) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.float().abs().max().clamp(min=1e-3)))


def padded(batches: int, length: int, block: int) -> Tensor:
    mask = torch.zeros(batches, length)
    mask[:, -block - 3:] = -torch.inf  # a whole block, and a part of one
    return mask


def least(batches: int, length: int, block: int) -> Tensor:
    """Return a mask that hides as `padded` does, by finite numbers, and all keys of the last sample."""
    mask = padded(batches, length, block).clamp(min=HIDES)
    mask[-1] = torch.finfo(torch.float32).min
    return mask


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "key padding": {"key_padding": lambda b, n, k: padded(b, n, k)},
    "key padding that multiplies": {
        "key_padding": lambda b, n, k: (padded(b, n, k) == 0).float(), "key_padding_mode": "mul"},
    "key padding of the least numbers": {"key_padding": lambda b, n, k: least(b, n, k)},
    "mask of the least number of fp16": {
        "mask": lambda b, n, k: torch.zeros(n, n).half().masked_fill(torch.ones(n, n).triu(n // 2).bool(), HIDES)},
    "bias of the least number": {
        "bias": lambda b, n, k: torch.zeros(n, n).masked_fill(torch.arange(n) % 7 != 0, -1e9), "causal": True},
    "mask of bool": {"mask": lambda b, n, k: torch.rand(n, n, generator=torch.Generator().manual_seed(5)) < 0.8},
    "mask of bf16": {"mask": lambda b, n, k: torch.randn(n, n, generator=torch.Generator().manual_seed(5)).bfloat16()},
    "causal mask that multiplies": {"causal": True, "mask_mode": "mul",
                                    "mask": lambda b, n, k: torch.ones(n, n, dtype=torch.float16).triu(-3)},
    "dropout": {"dropout": 0.2, "seed": 2**61 + 12345},
    "bias of each head": {"bias": lambda b, n, k: torch.randn(4, n, n, generator=torch.Generator().manual_seed(6))},
    "bias of each batch, and all others": {
        "bias": lambda b, n, k: torch.randn(b, 1, n, n, generator=torch.Generator().manual_seed(6)),
        "dropout": 0.1, "seed": 3, "causal": True, "key_padding": lambda b, n, k: padded(b, n, k), "scale": 0.2},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("block", "kv_heads", "dim", "layout_heads"), [
    (16, 4, 64, 1), (16, 2, 40, 4), (32, 1, 16, 4), (48, 4, 24, 1), (64, 2, 64, 4), (128, 4, 80, 1),
])  # fmt: skip
def test_fast_backends_equal_the_reference(case: str, block: int, kv_heads: int, dim: int, layout_heads: int) -> None:
    blocks = random_blocks(layout_heads, 5, block)
    tensors = operands(blocks, 4, kv_heads, dim)
    options = {name: value(2, blocks.length, block) if callable(value) else value for name, value in CASES[case].items()}
    expected = passes("reference", tensors, blocks, **options)
    for backend in FAST:
        close(passes(backend, tensors, blocks, **options), expected)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("causal", [False, True])
def test_the_layout_of_ones_is_dense_attention(backend: Any, causal: bool) -> None:
    blocks = Blocks.dense(128, 128, 32)
    query, key, value = operands(blocks, 2, 2, 32)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    close([attend(query, key, value, blocks, causal=causal, backend=backend)], [expected])


@pytest.mark.parametrize("backend", FAST)
def test_lengths_of_queries_and_keys_may_differ(backend: Any) -> None:
    blocks = Blocks.of(torch.rand(1, 3, 5, generator=torch.Generator().manual_seed(0)) < 0.6, 16)
    tensors = operands(blocks, 2, 2, 16)
    close(passes(backend, tensors, blocks), passes("reference", tensors, blocks))


@pytest.mark.parametrize("backend", ["gather", "auto"])
@pytest.mark.parametrize("value_dim", [1, 8, 40])
@pytest.mark.parametrize("layout_heads", [1, 4])
def test_values_may_be_of_another_dim_than_keys(backend: Any, value_dim: int, layout_heads: int) -> None:
    blocks = random_blocks(layout_heads, 5, 16)
    query, key, value = operands(blocks, 4, 2, 24)
    tensors = [query, key, torch.randn(*value.shape[:3], value_dim, generator=torch.Generator().manual_seed(4))]
    got = passes(backend, tensors, blocks, dropout=0.1, seed=2, causal=True)
    close(got, passes("reference", tensors, blocks, dropout=0.1, seed=2, causal=True))
    assert got[0].shape == (2, 4, blocks.length, value_dim)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_of_16_bits_are_computed_in_fp32(backend: Any, dtype: torch.dtype) -> None:
    blocks = random_blocks(1, 4, 16)
    tensors = operands(blocks, 2, 2, 16, dtype=dtype)
    got = passes(backend, tensors, blocks)
    wide = passes("reference", [each.float() for each in tensors], blocks)
    assert torch.equal(got[0], passes(backend, [each.float() for each in tensors], blocks)[0].to(dtype))
    close([each.float() for each in got], wide, tolerance=2e-2)


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_rows_that_see_nothing_give_zeros_and_no_nan(backend: Any) -> None:
    blocks = random_blocks(1, 5, 16)
    tensors = operands(blocks, 2, 2, 16)
    hidden = torch.zeros(2, blocks.length)
    hidden[1] = -torch.inf  # a sample that sees nothing
    output, to_query, to_key, to_value = passes(backend, tensors, blocks, key_padding=hidden)
    assert not output[:, :, 32:48].any() and not to_query[:, :, 32:48].any()
    assert not output[1].any() and not to_key[1].any() and not to_value[1].any()
    assert output[0, :, :32].all() and not any(each.isnan().any() for each in (output, to_query, to_key, to_value))


@pytest.mark.parametrize("backend", ["reference", *FAST])
@pytest.mark.parametrize("name", ["key_padding", "mask", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_addend_of_the_least_fp16_or_less_hides_as_minus_infinity(backend: Any, name: str, dtype: torch.dtype) -> None:
    blocks = random_blocks(1, 5, 16)
    tensors = operands(blocks, 2, 2, 16)
    shape = (2 if name == "key_padding" else blocks.length, blocks.kv_length)
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    hidden[1] = True  # a sample or a row that sees nothing
    for number in (HIDES, torch.finfo(dtype).min):
        given, infinite = (torch.zeros(shape, dtype=dtype).masked_fill(hidden, each) for each in (number, -torch.inf))
        got, expected = (passes(backend, tensors, blocks, **{name: each}) for each in (given, infinite))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert not (got[0][1] if name == "key_padding" else got[0][:, :, 1]).any()


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_an_addend_just_above_the_least_fp16_is_added(backend: Any) -> None:
    blocks = Blocks.dense(64, 64, 16)
    query, key, value = operands(blocks, 2, 2, 16)
    mask = torch.full((2, 64), -65503.0)
    torch.testing.assert_close(attend(query, key, value, blocks, key_padding=mask, backend=backend),
                               attend(query, key, value, blocks, backend=backend), rtol=0, atol=0.01)


@pytest.mark.parametrize("backend", FAST)
def test_nan_in_an_operand_reaches_the_output(backend: Any) -> None:
    blocks = Blocks.dense(64, 64, 16)
    query, key, value = operands(blocks, 2, 2, 16)
    key[0, 0, 40, 3] = torch.nan
    output = attend(query, key, value, blocks, backend=backend)
    assert output[0, 0].isnan().all() and not output[0, 1].isnan().any() and not output[1].isnan().any()


@pytest.mark.parametrize("backend", FAST)
def test_nan_in_a_bias_reaches_the_output(backend: Any) -> None:
    blocks = Blocks.dense(64, 64, 16)
    bias = torch.zeros(64, 64)
    bias[5, 7] = torch.nan
    output = attend(*operands(blocks, 2, 2, 16), blocks, bias=bias, backend=backend)
    assert output[:, :, 5].isnan().all() and not output[:, :, 6].isnan().any()


def test_dropout_drops_the_share_asked_for_and_keeps_the_mean() -> None:
    blocks = Blocks.dense(256, 256, 64)
    query, key, _ = operands(blocks, 4, 4, 16, batches=1)
    value = torch.ones_like(key)
    output = attend(torch.zeros_like(query), key, value, blocks, dropout=0.3, seed=7)
    kept = output[..., 0] * 0.7  # the share of equal weights that stays, row by row
    assert abs(float(kept.mean()) - 0.7) < 0.005 and 0.02 < float(kept.std()) < 0.04  # sqrt(0.3 * 0.7 / 256) = 0.029
    assert not torch.equal(output, attend(torch.zeros_like(query), key, value, blocks, dropout=0.3, seed=8))


def test_the_seed_comes_from_the_generator_of_the_host() -> None:
    blocks = Blocks.dense(64, 64, 16)
    tensors = operands(blocks, 2, 2, 16)
    torch.manual_seed(3)
    first, second = (attend(*tensors, blocks, dropout=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, attend(*tensors, blocks, dropout=0.5)) and not torch.equal(first, second)


def test_bits_do_not_depend_on_threads() -> None:
    blocks = random_blocks(4, 6, 16)
    tensors = operands(blocks, 4, 2, 32)
    bias = torch.randn(4, blocks.length, blocks.kv_length, generator=torch.Generator().manual_seed(6))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 9):  # 9: more than (batch, key head) pairs, so that backward makes two passes
            torch.set_num_threads(threads)
            results.append(passes("native", tensors, blocks, bias=bias, dropout=0.1, seed=1))
    finally:
        torch.set_num_threads(before)
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("backend", ["reference", *FAST])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bits_do_not_depend_on_the_default_dtype(backend: Any, dtype: torch.dtype) -> None:
    blocks = random_blocks(4, 5, 16)
    tensors = operands(blocks, 4, 2, 24)
    options = {"bias": torch.randn(4, blocks.length, blocks.kv_length, generator=torch.Generator().manual_seed(6)),
               "key_padding": padded(2, blocks.length, 16) == 0, "dropout": 0.1, "seed": 1}
    expected = passes(backend, tensors, blocks, **options)
    with default_dtype(dtype):
        assert all(map(torch.equal, passes(backend, tensors, blocks, **options), expected))


@pytest.mark.parametrize("backend", ["reference", *FAST])
@pytest.mark.parametrize("kind", [FixedSparsityConfig, VariableSparsityConfig, BigBirdSparsityConfig,
                                  BSLongformerSparsityConfig, LocalSlidingWindowSparsityConfig, DenseSparsityConfig])
def test_bits_do_not_depend_on_the_default_device(backend: Any, kind: Any) -> None:
    tensors = operands(Blocks.dense(80, 80, 16), 4, 2, 24)

    def computed() -> list[Tensor]:
        _of_content.cache_clear()  # whose blocks are made already
        structure = kind(4, 16)
        assert structure.make_layout(80).is_cpu
        torch.manual_seed(2)
        return passes(backend, tensors, structure.blocks(80), dropout=0.1, causal=True)

    expected = computed()
    with torch.device("meta"):
        assert all(map(torch.equal, computed(), expected))


def test_results_in_huge_pages_have_the_bits_of_smaller_ones() -> None:
    length, dim = 1 << 17, 128  # 64 MiB each, from where the kernel requests huge pages
    tensors = [torch.randn(1, 1, length, dim, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    whole = passes("native", tensors, Blocks.of(torch.eye(length // 64)[None], 64))
    gradient = torch.randn(1, 1, length, dim, generator=torch.Generator().manual_seed(9))
    half = [each[:, :, :length // 2].clone().requires_grad_() for each in tensors]
    output = attend(*half, Blocks.of(torch.eye(length // 128)[None], 64), backend="native")
    output.backward(gradient[:, :, :length // 2])
    for one, other in zip(whole, [output.detach(), *(each.grad for each in half)], strict=True):
        assert other is not None and torch.equal(one[:, :, :length // 2], other)


def test_operands_may_be_transposed_views() -> None:
    blocks = random_blocks(1, 5, 16)
    tensors = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in operands(blocks, 4, 4, 32)]
    close(passes("native", tensors, blocks), passes("reference", tensors, blocks))


@pytest.mark.parametrize("backend", FAST)
def test_lazily_negated_views_have_their_values(backend: Any) -> None:
    blocks = random_blocks(1, 4, 16)
    tensors = operands(blocks, 2, 1, 16)
    options = {"bias": torch.rand(blocks.length, blocks.kv_length), "key_padding": torch.rand(2, blocks.kv_length)}
    for turned in range(5):  # an operand, the bias or the mask; and the gradient each time
        results: list[list[Tensor]] = []
        for negate in (torch.neg, torch._neg_view):
            leaves = [each.clone().requires_grad_() for each in tensors]
            given = [*leaves, *options.values()]
            given[turned] = negate(given[turned])
            query, key, value, bias, padding = given
            output = attend(query, key, value, blocks, bias=bias, key_padding=padding, backend=backend)
            gradient = torch.ones(output.shape)
            results.append([output.detach(), *torch.autograd.grad(output, leaves, negate(gradient))])
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("backend", ["reference", *FAST])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2])
def test_a_bias_of_any_float_dtype_is_added_and_has_its_gradient(backend: Any, dtype: torch.dtype) -> None:
    blocks = random_blocks(1, 4, 16)
    tensors = operands(blocks, 2, 2, 16)
    bias = torch.randn(blocks.length, blocks.kv_length, generator=torch.Generator().manual_seed(4)).to(dtype)
    *got, to_bias = passes(backend, tensors, blocks, bias=bias)
    *expected, expected_to_bias = passes("reference", tensors, blocks, bias=bias.float())
    close(got, expected)
    assert to_bias.dtype == dtype
    close([to_bias.float()], [expected_to_bias.to(dtype).float()], 1e-5 if dtype == torch.float64 else 0.25)


def test_gradients_equal_finite_differences() -> None:
    blocks = random_blocks(1, 3, 16)
    query, key, value = operands(blocks, 1, 1, 16, batches=1)
    gradient = passes("native", [query, key, value], blocks)[1]
    direction = torch.randn(query.shape, generator=torch.Generator().manual_seed(2))
    weight = torch.randn(query.shape, generator=torch.Generator().manual_seed(9))
    step = 1e-2
    change = [(attend(query + sign * step * direction, key, value, blocks, backend="reference").double() * weight).sum()
              for sign in (1, -1)]
    assert abs(float((change[0] - change[1]) / (2 * step)) - float((gradient * direction).sum())) < 2e-3


def test_small_blocks_are_computed_by_gather_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    blocks = random_blocks(1, 5, 7)  # a block that no other test has: a warning comes once in a process
    tensors = operands(blocks, 2, 2, 16)
    for _ in range(2):
        close(passes("auto", tensors, blocks), passes("reference", tensors, blocks))
    assert sum("takes multiples of 16" in each.message for each in caplog.records) == 1


def test_the_warning_of_a_fallback_names_the_dim_of_values(caplog: pytest.LogCaptureFixture) -> None:
    blocks = random_blocks(1, 5, 16)
    query, key, value = operands(blocks, 2, 2, 16)
    attend(query, key, value[..., :11], blocks)
    assert [each.message for each in caplog.records if "values of dim 11 and keys of dim 16" in each.message]
    assert not any("takes multiples of 16" in each.message for each in caplog.records)


@pytest.mark.parametrize(("block", "dims", "got"), [
    (128, (16, 16), "block 128, head dims 16 and 16"), (64, (128, 128), "block 64, head dims 128 and 128"),
    (32, (16, 9), "block 32, head dims 16 and 9"),
])  # fmt: skip
def test_a_device_falls_back_to_gather_with_one_warning(block: int, dims: tuple[int, int], got: str,
                                                        monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("shoal.log._warned", set())
    query, value = (torch.zeros(1, 2, 256, dim, device="meta") for dim in dims)

    def warnings(*, compiles: bool, installed: bool) -> list[str]:
        module = import_module("shoal.attention.attend")  # the package has a function of this name
        monkeypatch.setattr(module, "has_triton", lambda _: compiles)
        monkeypatch.setattr(module, "find_spec", lambda _: installed or None)
        caplog.clear()
        for _ in range(2):
            assert attend(query, query, value, Blocks.dense(256, 256, block)).shape == value.shape
        return [each.message for each in caplog.records]

    text = "attention on meta is computed by torch operations: "
    assert warnings(compiles=False, installed=True) == [f"{text}Triton does not compile for meta"]
    assert warnings(compiles=True, installed=False) == [f"{text}the package triton is not installed"]
    assert warnings(compiles=True, installed=True) == [
        f"{text}Triton's kernels take blocks of 16, 32 or 64, equal head dims of keys and values, and block * head dim * "
        f"bytes of an element up to 16384; got {got}, torch.float32"]


def _bad(**changes: Any) -> dict[str, Any]:
    return changes


@pytest.mark.parametrize(("changes", "message"), [
    (_bad(query=torch.zeros(1, 2, 65, 8)), "query has length 65, the layout is for 64; pad it to a multiple of the block"),
    (_bad(query=torch.zeros(1, 2, 80, 8)), "query has length 80, the layout is for 64; make the layout for length 80"),
    (_bad(key=torch.zeros(1, 2, 48, 8), value=torch.zeros(1, 2, 48, 8)), "key has length 48"),
    (_bad(query=torch.zeros(1, 3, 64, 8)), "one number of heads, which divides that of the query"),
    (_bad(query=torch.zeros(1, 2, 64, 16)), "one head dim"),
    (_bad(query=torch.zeros(64, 8)), "operands are (batches, heads, length, dim)"),
    (_bad(query=torch.zeros(1, 2, 64, 8).half()), "one dtype, and one device"),
    (_bad(query=torch.zeros(1, 2, 64, 8, dtype=torch.float64), key=torch.zeros(1, 2, 64, 8, dtype=torch.float64),
          value=torch.zeros(1, 2, 64, 8, dtype=torch.float64)), "float32, bfloat16 or float16"),
    (_bad(blocks=Blocks.of(torch.eye(4).long()[None].repeat(3, 1, 1) * torch.tensor([1, 0, 1])[:, None, None], 16)),
     "the layout is for 3 heads, query has 2"),
    (_bad(dropout=1.0), "dropout is a probability"),
    (_bad(dropout=0.1, seed=1.5), "seed is a whole number, or None; got 1.5"),
    (_bad(blocks=torch.ones(1, 4, 4)), "of class Blocks; got Tensor: give Blocks.of(layout, block)"),
    (_bad(causal="no"), "causal is true or false; got 'no'"),
    (_bad(dropout="0.1"), "dropout is a probability, at least 0 and below 1; got '0.1'"),
    (_bad(dropout=None), "got None"),
    (_bad(dropout=torch.tensor(0.1)), "dropout is a probability, at least 0 and below 1; got tensor(0.1000)"),
    (_bad(dropout=0.1, seed=torch.tensor([1, 2])), "seed is a whole number, or None; got tensor([1, 2])"),
    (_bad(first_head=0.5), "first_head is the number of a head, from 0; got 0.5"),
    (_bad(first_head=-1), "first_head is the number of a head, from 0; got -1"),
    (_bad(query=None), "query is a tensor (batches, heads, length, dim); got NoneType: give one"),
    (_bad(key=[[1.0]]), "key is a tensor (batches, heads, length, dim); got list: give torch.as_tensor of it"),
    (_bad(value=torch.zeros(1, 2, 64, 8).to_sparse()), "got one of torch.sparse_coo: give its to_dense()"),
    (_bad(query=torch.nested.as_nested_tensor(torch.zeros(1, 2, 64, 8))), "got a nested one: give its to_padded_tensor"),
    (_bad(bias=[[0.0]]), "bias is a tensor (batches or 1, heads or 1, length, kv_length); got list"),
    (_bad(bias=torch.eye(64).to_sparse()), "got one of torch.sparse_coo"),
    (_bad(key_padding=torch.zeros(1, 64).to_sparse()), "key_padding is a dense tensor of bool, whole or float numbers"),
    (_bad(mask=[[1]]), "mask is a tensor of bool, whole or float numbers; got list"),
    (_bad(mask=torch.zeros(64, 64, dtype=torch.complex64)), "got torch.complex64"),
    (_bad(backend="fast"), "backend is one of"),
    (_bad(mask=torch.zeros(32, 64)), "mask is (length, kv_length), here (64, 64); got (32, 64)"),
    (_bad(key_padding=torch.zeros(2, 64)), "key_padding is (batches, kv_length), here (1, 64); got (2, 64)"),
    (_bad(mask=torch.zeros(64, 64), mask_mode="sum"), "mask_mode is 'add' or 'mul'; got 'sum'"),
    (_bad(mask=torch.full((64, 64), torch.nan)), "mask has NaN"),
    (_bad(key_padding=torch.full((1, 64), torch.nan)), "key_padding has NaN"),
    (_bad(key_padding=torch.full((1, 64), torch.inf)), "key_padding has +inf"),
    (_bad(key_padding=torch.ones(1, 64, dtype=torch.long)), "key_padding has whole numbers above 0 (torch.int64)"),
    (_bad(mask=torch.ones(64, 64, dtype=torch.uint8)), "give mask.bool(), or mode 'mul'"),
    (_bad(scale=torch.nan), "scale is a finite number of fp32; got nan"),
    (_bad(scale="x"), "scale is a finite number of fp32; got 'x'"),
    (_bad(scale=1e39), "scale is a finite number of fp32; got 1e+39"),
    (_bad(mask_mode="sum"), "mask_mode is 'add' or 'mul'; got 'sum'"),
    (_bad(key_padding_mode="zzz"), "key_padding_mode is 'add' or 'mul'; got 'zzz'"),
    (_bad(key=torch.zeros(1, 0, 64, 8), value=torch.zeros(1, 0, 64, 8)), "at least one head"),
    (_bad(query=torch.zeros(1, 2, 64, 0), key=torch.zeros(1, 2, 64, 0), value=torch.zeros(1, 2, 64, 0)), "at least 1; got"),
    (_bad(bias=torch.zeros(3, 64, 64)), "bias is (batches or 1, heads or 1, length, kv_length)"),
    (_bad(backend="native", blocks=Blocks.dense(64, 64, 8)), "multiples of 16"),
    (_bad(causal=True, blocks=Blocks.dense(64, 32, 16), key=torch.zeros(1, 2, 32, 8), value=torch.zeros(1, 2, 32, 8)),
     "causal needs equal lengths"),
])  # fmt: skip
def test_bad_calls_say_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {name: torch.zeros(1, 2, 64, 8) for name in ("query", "key", "value")}
    with pytest.raises(UsageError) as caught:
        attend(**{**good, "blocks": Blocks.dense(64, 64, 16), **changes})
    assert message in str(caught.value)


def without_memory() -> list[str]:
    """Return what attention says of a DTensor, as each operand in turn."""
    plain, blocks = torch.zeros(1, 2, 64, 16), Blocks.dense(64, 64, 16)
    mesh = init_device_mesh("cpu", (1,))
    given = {"query": plain, "key": plain, "value": plain, "key_padding": torch.ones(1, 64), "mask": torch.ones(64, 64),
             "bias": torch.zeros(64, 64)}
    messages: list[str] = []
    for name, tensor in given.items():
        for backend in ("auto", *FAST):
            options: dict[str, Any] = {**given, name: distribute_tensor(tensor, mesh, [Replicate()])}
            with pytest.raises(UsageError) as caught:
                attend(**options, blocks=blocks, backend=backend)
            messages.append(str(caught.value))
    return messages


def test_a_dtensor_has_no_memory_that_kernels_could_read() -> None:
    (messages,) = run_ranks(1, without_memory)
    names = ("query", "key", "value", "key_padding", "mask", "bias")
    assert messages == [f"attend: {name} is a tensor with memory of its own; got DTensor, whose class computes by operators "
                        f"alone: give a plain tensor, of a DTensor its to_local()" for name in names for _ in range(3)]


@pytest.mark.parametrize("backend", ["auto", *FAST])
def test_a_tensor_of_fake_mode_has_no_memory_either(backend: Any) -> None:
    blocks = Blocks.dense(64, 64, 16)
    with FakeTensorMode():
        query = torch.zeros(1, 2, 64, 16)
        with pytest.raises(UsageError, match="query is a tensor with memory of its own; got FakeTensor"):
            attend(query, query, query, blocks, backend=backend)


class Awaited(Tensor):
    """A tensor whose values any operator brings."""

    values: Tensor

    @staticmethod
    def __new__(cls: Any, values: Tensor) -> Any:
        self = Tensor._make_wrapper_subclass(cls, values.shape, strides=values.stride(), dtype=values.dtype)
        self.values = values
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(each.values if isinstance(each, Awaited) else each for each in args), **(kwargs or {}))


@pytest.mark.parametrize("backend", ["auto", *FAST])
def test_operators_bring_the_values_of_a_tensor_that_waits_for_them(backend: Any) -> None:
    blocks = random_blocks(1, 4, 16)
    tensors, bias = operands(blocks, 2, 2, 16), torch.randn(1, 1, 64, 64)
    output = attend(*(Awaited(each) for each in tensors), blocks, bias=Awaited(bias), backend=backend)
    assert torch.equal(output, attend(*tensors, blocks, bias=bias, backend=backend))


class Named(Tensor):
    """A tensor with a class of its own, in memory as others are."""


@pytest.mark.parametrize("backend", ["auto", "reference", *FAST])
def test_a_subclass_with_memory_is_computed(backend: Any) -> None:
    blocks = random_blocks(1, 4, 16)
    tensors = operands(blocks, 2, 2, 16)
    output = attend(*(each.as_subclass(Named) for each in tensors), blocks, backend=backend)
    assert torch.equal(output.as_subclass(Tensor), attend(*tensors, blocks, backend=backend))


def test_transforms_of_functions_are_computed_by_the_reference_alone() -> None:
    query, blocks = torch.randn(1, 2, 64, 8), Blocks.dense(64, 64, 16)

    def total(query: Tensor, backend: Any) -> Tensor:
        return attend(query, query, query, blocks, backend=backend).square().sum()

    with pytest.raises(UsageError, match=r"within a transform of torch.func.* only backend='reference' computes"):
        torch.func.grad(total)(query, "auto")
    leaf = query.clone().requires_grad_()
    total(leaf, "auto").backward()
    torch.testing.assert_close(torch.func.grad(total)(query, "reference"), leaf.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode calls it
def test_the_reference_has_all_derivatives_in_fp32() -> None:
    query, tangent, blocks = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8), Blocks.dense(64, 64, 16)

    def total(query: Tensor) -> Tensor:
        return attend(query, query, query, blocks, backend="reference").square().sum()

    def plain(query: Tensor) -> Tensor:
        scores = (query.double() @ query.double().mT * 8**-0.5).softmax(-1)
        return (scores @ query.double()).square().sum()

    leaf = query.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        (gradient,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(gradient, torch.func.grad(plain)(query), rtol=1e-4, atol=1e-4)
    for along in (lambda f: torch.func.jvp(f, (query,), (tangent,))[1],
                  lambda f: torch.func.jvp(torch.func.grad(f), (query,), (tangent,))[1],
                  lambda f: torch.func.vmap(torch.func.grad(f))(torch.stack([query, tangent]))):
        torch.testing.assert_close(along(total), along(plain).float(), rtol=1e-4, atol=1e-4)


class OfItself(nn.Module):
    """The attention of a sequence to itself, and a product."""

    def __init__(self, backend: Any, *, causal: bool = False):
        super().__init__()
        self.backend, self.causal, self.blocks = backend, causal, Blocks.dense(64, 64, 16)

    def forward(self, query: Tensor) -> Tensor:
        return 2.0 * attend(query, query, query, self.blocks, causal=self.causal, dropout=0.5, seed=1, backend=self.backend)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_reference_in_a_graph_leaves_no_tensor_of_it_behind() -> None:
    query = torch.randn(1, 2, 64, 16)
    of_graphs, of_gather = OfItself("reference", causal=True), OfItself("gather", causal=True)
    of_gather.blocks = of_graphs.blocks
    expected = attend(query, query, query, of_graphs.blocks, causal=True, dropout=0.5, seed=1, backend="reference") * 2.0
    exported = torch.export.export(of_graphs, (query,), strict=False)
    torch.testing.assert_close(exported.module()(query), expected)
    torch.testing.assert_close(torch.compile(of_graphs, backend="aot_eager", fullgraph=True)(query), expected)
    torch.testing.assert_close(of_graphs(query), expected)
    torch.testing.assert_close(of_gather(query), expected)


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["auto", "gather", "reference"])
def test_a_compiled_model_breaks_its_graph_at_attention(backend: Any) -> None:
    module, results = OfItself(backend), []
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=backend == "reference")):
        leaf = torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        output = call(leaf)
        results.append([output.detach(), *torch.autograd.grad(output.sum(), leaf)])
    torch.testing.assert_close(*results)


def test_a_graph_without_breaks_names_the_backend_that_it_can_have() -> None:
    query = torch.randn(1, 2, 64, 8)
    with pytest.raises(Unsupported, match="only backend='reference' is part of a graph"):
        torch.compile(OfItself("auto"), backend="aot_eager", fullgraph=True)(query)
    with pytest.raises(UsageError, match=r"where torch.export, .* only backend='reference' computes; got backend='auto'"):
        torch.export.export(OfItself("auto"), (query,))


@pytest.mark.parametrize("backend", ["auto", "reference", *FAST])
@pytest.mark.parametrize("strided", [False, True])
def test_an_empty_batch_gives_an_empty_output(backend: Any, strided: bool) -> None:
    tensors = [torch.zeros(0, 2, 64, 32)[..., ::2] if strided else torch.zeros(0, 2, 64, 16) for _ in range(3)]
    allowed: dict[str, dict[str, Any]] = {
        "plain": {}, "dropout": {"dropout": 0.1}, "key padding": {"key_padding": torch.ones(0, 64, dtype=torch.bool)},
        "mask": {"mask": torch.zeros(64, 64)}, "bias": {"bias": torch.ones(64, 64)},
        "bias of each sample": {"bias": torch.zeros(0, 1, 64, 64), "causal": True}}
    for options in allowed.values():
        output, *gradients = passes(backend, tensors, Blocks.dense(64, 64, 16), **options)
        assert output.shape == (0, 2, 64, 16) and not any(each.any() for each in gradients)
        assert [each.shape for each in gradients[3:]] == [each.shape for name, each in options.items() if name == "bias"]


def test_a_mask_that_asks_for_a_gradient_is_told_that_it_gets_none(caplog: pytest.LogCaptureFixture) -> None:
    blocks = Blocks.dense(64, 64, 16)
    learned = torch.zeros(64, 64, requires_grad=True)
    attend(*operands(blocks, 1, 1, 16), blocks, mask=learned)
    assert "mask requires a gradient, and gets none: give what is learned as bias" in caplog.text


def test_autocast_takes_operands_of_two_dtypes() -> None:
    query, value = torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got = attend(query, query, value, Blocks.dense(64, 64, 16))
        expected = torch.nn.functional.scaled_dot_product_attention(query, query, value)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["reference", *FAST])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_of_fp32_within_autocast(backend: Any, dtype: torch.dtype) -> None:
    blocks = random_blocks(4, 5, 16)
    tensors = operands(blocks, 4, 2, 24)
    bias = torch.randn(4, blocks.length, blocks.kv_length, generator=torch.Generator().manual_seed(6))
    expected = passes(backend, tensors, blocks, bias, dropout=0.1, seed=1)
    with torch.autocast("cpu", dtype):
        got = passes(backend, tensors, blocks, bias, dropout=0.1, seed=1)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("backend", ["auto", *FAST])
def test_a_query_of_overlapping_windows_is_computed(backend: Any) -> None:
    query = torch.randn(1, 2, 64 + 127, generator=torch.Generator().manual_seed(0)).unfold(-1, 128, 1)
    blocks = random_blocks(1, 4, 16)
    key, value = torch.randn(2, 1, 2, 64, 128, generator=torch.Generator().manual_seed(1))
    ours = passes(backend, [query, key, value], blocks)
    assert all(torch.allclose(a, b, atol=TOLERANCE) for a, b in zip(
        ours, passes("reference", [query.contiguous(), key, value], blocks), strict=True))
    with torch.no_grad():
        assert torch.allclose(attend(query, key, value, blocks, backend=backend), ours[0], atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int64])
def test_masks_and_layouts_of_every_dtype_hide_where_they_are_zero(dtype: torch.dtype) -> None:
    seen = torch.arange(64) % 3 > 0
    mask = seen.to(dtype) * 1e-50 if dtype == torch.float64 else seen.to(dtype)
    blocks, (query, key, value) = random_blocks(1, 4, 16), operands(random_blocks(1, 4, 16), 2, 2, 16, batches=1)
    expected = attend(query, key, value, blocks, key_padding=seen[None])
    assert torch.equal(attend(query, key, value, blocks, key_padding=mask[None], key_padding_mode="mul"), expected)
    assert Blocks.of(blocks.layout.to(dtype), 16) is blocks
    with pytest.raises(UsageError, match="a layout has entries 0 and 1 alone"):
        Blocks.of(torch.full((1, 2, 2), 2).to(dtype), 16)


def test_a_mask_made_in_inference_mode_serves_training() -> None:
    blocks = random_blocks(1, 4, 16)
    with torch.inference_mode():
        padding = torch.arange(64)[None] < 50
    tensors = operands(blocks, 2, 2, 16, batches=1)
    for a, b in zip(passes("auto", tensors, blocks, key_padding=padding),
                    passes("auto", tensors, blocks, key_padding=torch.arange(64)[None] < 50), strict=True):
        assert torch.equal(a, b)


def test_options_may_be_numbers_of_numpy() -> None:
    blocks = Blocks.dense(64, 64, 16)
    tensors = operands(blocks, 2, 2, 16)
    expected = attend(*tensors, blocks, causal=True, dropout=0.5, seed=3, first_head=1)
    numbers: dict[str, Any] = {"causal": np.True_, "dropout": np.float32(0.5), "seed": np.int64(3), "first_head": np.int8(1)}
    assert torch.equal(attend(*tensors, blocks, **numbers), expected)


def test_the_native_backend_is_built_where_there_is_a_compiler() -> None:
    assert native.available() and "native" in BACKENDS
