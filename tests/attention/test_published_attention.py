"""The published modules, products and tools: dense layouts are plain attention, and layouts are masks of it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparseSelfAttention,
    TensorSparsityConfig,
)
from shoal.attention.bert import SparseAttentionUtils
from shoal.attention.block_products import MatMul, Softmax
from shoal.errors import NotServed, UsageError

HEADS, BLOCK, LENGTH, DIM = 3, 16, 64, 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_layout() -> Tensor:
    layout = torch.rand(HEADS, 4, 4, generator=torch.Generator().manual_seed(2)) < 0.5
    layout[:, 1] = False  # a row that sees nothing
    return layout.long()


def dense(layout: Tensor) -> Tensor:
    return layout.bool().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


def operands() -> list[Tensor]:
    return [draw(2, HEADS, LENGTH, DIM, seed=seed) for seed in range(3)]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# SparseSelfAttention


def test_self_attention_is_sdpa_under_the_layout_and_the_masks() -> None:
    structure = FixedSparsityConfig(HEADS, BLOCK, num_local_blocks=2)
    module = SparseSelfAttention(structure, max_seq_length=LENGTH)
    query, key, value = operands()
    rpe, keep, seen = draw(HEADS, LENGTH, LENGTH, seed=5), torch.ones(2, LENGTH), torch.ones(LENGTH, LENGTH).tril()
    keep[0, 50:] = -torch.inf
    keep = torch.where(keep == 1, 0.0, keep)
    visible = dense(structure.make_layout(LENGTH)) & seen.bool()
    mask = torch.zeros(2, HEADS, LENGTH, LENGTH).masked_fill(~visible, -torch.inf) + rpe + keep[:, None, None]
    close(module(query, key, value, rpe, keep, seen), F.scaled_dot_product_attention(query, key, value, mask))
    close(module(query, key.transpose(-1, -2), value, rpe, keep[:, None, None], seen[None, None]),
          F.scaled_dot_product_attention(query, key, value, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_self_attention_keeps_the_dtype(dtype: torch.dtype) -> None:
    module = SparseSelfAttention(DenseSparsityConfig(HEADS, BLOCK), max_seq_length=LENGTH)
    assert module(*(each.to(dtype) for each in operands())).dtype == dtype


def test_a_shorter_sequence_has_the_upper_left_part_of_the_layout() -> None:
    structure = BigBirdSparsityConfig(HEADS, BLOCK)
    module = SparseSelfAttention(structure, max_seq_length=8 * BLOCK)
    assert torch.equal(module.get_layout(LENGTH), structure.make_layout(8 * BLOCK)[:, :4, :4])
    assert list(module.state_dict()) == ["master_layout"]


def test_a_loaded_layout_takes_the_place_of_the_drawn_one() -> None:
    module = SparseSelfAttention(DenseSparsityConfig(HEADS, BLOCK), max_seq_length=LENGTH)
    query, key, value = operands()
    module(query, key, value)
    other = SparseSelfAttention(TensorSparsityConfig(random_layout(), BLOCK), max_seq_length=LENGTH)
    module.load_state_dict(other.state_dict())
    assert torch.equal(module(query, key, value), other(query, key, value))


def self_attention(**masks: Tensor) -> Tensor:
    return SparseSelfAttention(DenseSparsityConfig(HEADS, BLOCK), max_seq_length=LENGTH)(*operands(), **masks)


def bert_attention(mask: Tensor) -> Tensor:
    config = SimpleNamespace(hidden_size=HEADS * DIM, num_attention_heads=HEADS)
    torch.manual_seed(0)
    return BertSparseSelfAttention(config, DenseSparsityConfig(HEADS, BLOCK))(draw(2, LENGTH, HEADS * DIM), mask)


def test_a_mask_of_every_query_is_one_of_keys_where_its_rows_are_equal() -> None:
    padding = torch.zeros(2, 1, 1, LENGTH)
    padding[0, :, :, 50:] = torch.finfo(torch.float32).min
    for mask in (padding.expand(-1, -1, LENGTH, -1), padding.repeat(1, 1, LENGTH, 1), padding[:, 0, 0]):
        assert torch.equal(bert_attention(mask), bert_attention(padding))


class ClassValues:
    hidden_size, num_attention_heads, attention_probs_dropout_prob = HEADS * DIM, HEADS, 0.5


@dataclass(slots=True)
class SlotValues:
    hidden_size: int = HEADS * DIM
    num_attention_heads: int = HEADS
    attention_probs_dropout_prob: float = 0.5


class ItemValues(dict[str, Any]):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("config", [ClassValues(), SlotValues(), ItemValues(
    hidden_size=HEADS * DIM, num_attention_heads=HEADS, attention_probs_dropout_prob=0.5)], ids=["class", "slots", "items"])
def test_the_values_of_bert_are_read_of_any_object(config: Any) -> None:
    module = BertSparseSelfAttention(config, DenseSparsityConfig(HEADS, BLOCK)).sparse_self_attention
    assert (module.dropout, module.max_seq_length) == (0.5, 2048)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "no structure": (SparseSelfAttention, NotImplementedError, "no structure of its own"),
    "a section for a structure": (lambda: SparseSelfAttention({"mode": "fixed"}), ValueError,  # pyright: ignore
                                  "sparsity_config: got dict; give a structure"),
    "a section for a structure of BERT": (lambda: BertSparseSelfAttention(SimpleNamespace(
        hidden_size=8, num_attention_heads=4), {"mode": "fixed"}), ValueError, "sparsity_config: got dict"),  # pyright: ignore
    "no configuration": (lambda: BertSparseSelfAttention(None), ValueError,
                         "hidden_size of config, an object such as a BertConfig .*, is a whole number from 1; got None"),
    "no heads": (lambda: BertSparseSelfAttention(SimpleNamespace(hidden_size=8, num_attention_heads=0)), ValueError,
                 "num_attention_heads of config.* is a whole number from 1; got 0"),
    "no query": (lambda: SparseSelfAttention(DenseSparsityConfig(HEADS))(None, *operands()[1:]), UsageError,  # pyright: ignore
                 "SparseSelfAttention: query is a tensor .* got NoneType"),
    "an array of keys": (lambda: SparseSelfAttention(DenseSparsityConfig(HEADS))(
        operands()[0], operands()[1].numpy(), operands()[2]), UsageError, "key is a tensor .* got ndarray"),  # pyright: ignore
    "a list for a bias": (lambda: self_attention(rpe=[[0.0]]), UsageError,  # pyright: ignore
                          "bias is a tensor .* got list"),
    "a list for a padding mask": (lambda: self_attention(key_padding_mask=[[1]]), UsageError,  # pyright: ignore
                                  "key_padding_mask is a tensor .* got list"),
    "a switch for a mask": (lambda: self_attention(attn_mask=True), UsageError,  # pyright: ignore
                            "attn_mask is a tensor .* got bool"),
    "a list for a mask of BERT": (lambda: bert_attention([[1]]), UsageError, "attention_mask is a tensor .* got list"),  # pyright: ignore
    "a length of text": (lambda: SparseSelfAttention(DenseSparsityConfig(HEADS)).get_layout("64"), ValueError,  # pyright: ignore
                         "a length is a whole number; got '64'"),
    "an array for a product": (lambda: MatMul(random_layout(), BLOCK, "sdd")(
        operands()[0].numpy(), operands()[1]), UsageError, "a dense operand is a tensor .* got ndarray"),
    "mode": (lambda: SparseSelfAttention(DenseSparsityConfig(1), "sub"), ValueError, "key_padding_mask_mode: got 'sub'"),
    "mask mode": (lambda: SparseSelfAttention(DenseSparsityConfig(1), "add", "sub"), ValueError, "attn_mask_mode: got"),
    "longest": (lambda: SparseSelfAttention(DenseSparsityConfig(1), max_seq_length=100), ValueError, "no multiple"),
    "lengths": (lambda: SparseSelfAttention(DenseSparsityConfig(HEADS))(
        *operands()[:2], draw(2, HEADS, 2 * LENGTH, DIM)), NotImplementedError, "have one shape"),
    "too long": (lambda: SparseSelfAttention(DenseSparsityConfig(HEADS), max_seq_length=32)(*operands()), ValueError,
                 "at most 32; give max_seq_length=64"),
    "no multiple": (lambda: SparseSelfAttention(DenseSparsityConfig(HEADS))(*(draw(2, HEADS, 50, DIM) for _ in range(3))),
                    ValueError, "pad it by 14"),
    "heads": (lambda: SparseSelfAttention(DenseSparsityConfig(4))(*operands()), UsageError, "query has 3.*num_heads=3"),
    "three dims": (lambda: SparseSelfAttention(DenseSparsityConfig(HEADS))(*(each[0] for each in operands())), UsageError,
                   "got .3, 64, 8.: give all four dims"),
    "a transposed padding mask": (lambda: self_attention(key_padding_mask=torch.zeros(LENGTH, 2)), UsageError,
                                  "key_padding_mask: got .64, 2.; give .batch, length. .*here .2, 64."),
    "a padding mask of as many numbers": (lambda: self_attention(key_padding_mask=torch.zeros(4, LENGTH // 2)), UsageError,
                                          "key_padding_mask: got .4, 32."),
    "a padding mask of one sample": (lambda: self_attention(key_padding_mask=torch.zeros(1, LENGTH)), UsageError, ".1, 64"),
    "an attention mask of each sample": (lambda: self_attention(attn_mask=torch.ones(2, 1, LENGTH, LENGTH)), UsageError,
                                         "attn_mask: got .2, 1, 64, 64.; give .length, length. .*here .64, 64."),
    "an attention mask of one dim": (lambda: self_attention(attn_mask=torch.ones(LENGTH)), UsageError, "got .64,."),
    "a causal mask of BERT": (lambda: bert_attention(torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(
        ~torch.ones(LENGTH, LENGTH).tril().bool(), -1e4)), UsageError, "whose queries see different keys"),
    "hidden size": (lambda: BertSparseSelfAttention(SimpleNamespace(hidden_size=10, num_attention_heads=4)), ValueError,
                    "hidden_size: got 10.*give 12"),
    "product": (lambda: MatMul(random_layout(), BLOCK, "ddd"), NotImplementedError, "mode: got 'ddd'"),  # pyright: ignore
    "dense operand": (lambda: MatMul(random_layout(), BLOCK, "sdd")(draw(2, HEADS, 48, DIM), draw(2, HEADS, DIM, 64)),
                      UsageError, "with 64 along the sparse side"),
    "sparse operand": (lambda: Softmax(random_layout(), BLOCK)(draw(2, 1, BLOCK, BLOCK)), UsageError, "visited blocks"),
    "nothing to pad": (lambda: SparseAttentionUtils.pad_to_block_size(16, None, None, None, None, None, 0, None), ValueError,
                       "neither input_ids nor inputs_embeds"),
    "padding to no block": (lambda: SparseAttentionUtils.pad_to_block_size(0, torch.ones(1, 9, dtype=torch.long), None, None,
                                                                           None, None, 0, None), ValueError,
                            "block_size is a whole number from 1, .* got 0"),
    "padding to a block of text": (lambda: SparseAttentionUtils.pad_to_block_size(
        "16", torch.ones(1, 9, dtype=torch.long), None, None, None, None, 0, None), ValueError,  # pyright: ignore
        "block_size is a whole number from 1, the block of the structure; got '16'"),
    "padding of a list": (lambda: SparseAttentionUtils.pad_to_block_size(
        16, [[1, 2]], None, None, None, None, 0, None), UsageError, "input_ids is a tensor .* got list"),  # pyright: ignore
    "another model": (lambda: SparseAttentionUtils.extend_position_embedding(nn.Linear(2, 2), 8), ValueError,
                      "only BERT and RoBERTa"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_gets_the_published_error_with_the_fix(case: str) -> None:
    call, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        call()


# Products


def sparse_of(matrix: Tensor, layout: Tensor) -> Tensor:
    cut = matrix.unflatten(2, (4, BLOCK)).unflatten(4, (4, BLOCK)).transpose(3, 4)
    heads, rows, columns = layout.nonzero().unbind(1)
    return cut[:, heads, rows, columns]


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
def test_a_product_is_the_dense_one_over_the_layout_and_so_are_gradients(mode: Any, trans_a: bool, trans_b: bool) -> None:
    layout = random_layout()
    shapes = {"sdd": ((LENGTH, DIM), (DIM, LENGTH)), "dsd": ((LENGTH, LENGTH), (LENGTH, DIM)),
              "dds": ((DIM, LENGTH), (LENGTH, LENGTH))}[mode]
    leaves: list[Tensor] = []
    for place, (shape, transposed) in enumerate(zip(shapes, (trans_a, trans_b), strict=True)):
        matrix = draw(2, HEADS, *(shape[::-1] if transposed else shape), seed=place)
        leaves.append(matrix * dense(layout) if mode[place + 1] == "s" else matrix)
        leaves[-1].requires_grad_()
    given = [sparse_of(leaf, layout) if mode[place + 1] == "s" else leaf for place, leaf in enumerate(leaves)]
    plain = [leaf.transpose(-1, -2) if flip else leaf for leaf, flip in zip(leaves, (trans_a, trans_b), strict=True)]
    product = plain[0] @ plain[1]
    expected = sparse_of(product, layout) if mode == "sdd" else product
    got = MatMul(layout, BLOCK, mode, trans_a, trans_b)(*given)
    close(got, expected)
    weights = draw(*got.shape, seed=9)
    for place, (a, b) in enumerate(zip(torch.autograd.grad((got * weights).sum(), leaves),
                                       torch.autograd.grad((expected * weights).sum(), leaves), strict=True)):
        close(a, b * dense(layout) if mode[place + 1] == "s" else b)


def test_the_softmax_of_blocks_is_that_of_rows_and_empty_rows_are_zeros() -> None:
    layout, scores = random_layout(), draw(2, HEADS, LENGTH, LENGTH)
    rpe, keep, seen = draw(LENGTH, LENGTH, seed=5), torch.ones(2, LENGTH), torch.ones(LENGTH, LENGTH).triu(-20)
    keep[1, :20] = 0
    whole = (scores * 0.3 + rpe).masked_fill(~(dense(layout) & (keep[:, None, None] * seen).bool()), -torch.inf)
    got = Softmax(layout, BLOCK)(sparse_of(scores, layout), 0.3, rpe, keep, seen, "mul", "mul")
    close(got, sparse_of(whole.softmax(-1).nan_to_num(0.0), layout))
    added = [torch.zeros_like(each).masked_fill(each == 0, -torch.inf) for each in (keep, seen)]
    assert torch.equal(got, Softmax(layout, BLOCK)(sparse_of(scores, layout), 0.3, rpe, *added))


def test_the_softmax_of_blocks_hides_by_finite_numbers_as_by_infinite_ones() -> None:
    softmax, padding = Softmax(random_layout(), BLOCK), torch.zeros(2, LENGTH)
    padding[0, 20:], padding[1] = -torch.inf, -torch.inf
    x = sparse_of(draw(2, HEADS, LENGTH, LENGTH), random_layout())
    finite = softmax(x, key_padding_mask=padding.clamp(min=-65504))
    assert torch.equal(finite, softmax(x, key_padding_mask=padding)) and not finite[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_softmax_of_blocks_does_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    softmax, padding = Softmax(random_layout(), BLOCK), torch.ones(2, LENGTH)
    padding[0, 20:] = 0
    x = sparse_of(draw(2, HEADS, LENGTH, LENGTH), random_layout())
    expected = softmax(x, key_padding_mask=padding, key_padding_mask_mode="mul")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        got = softmax(x, key_padding_mask=padding, key_padding_mask_mode="mul")
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("given", "text"), [
    ({"attn_mask": torch.zeros(32, 32), "attn_mask_mode": "x"}, "attn_mask_mode is 'add' or 'mul'; got 'x'"),
    ({"key_padding_mask": torch.zeros(2, 31)}, r"key_padding_mask is \(2, 32\) here.*; got \(2, 31\)"),
    ({"key_padding_mask": torch.full((2, 32), torch.nan)}, "key_padding_mask has NaN"),
    ({"key_padding_mask": torch.full((2, 32), torch.nan), "key_padding_mask_mode": "mul"}, "key_padding_mask has NaN"),
    ({"attn_mask": torch.full((32, 32), torch.inf)}, r"attn_mask has \+inf"),
    ({"key_padding_mask": torch.ones(2, 32).long()}, r"has whole numbers above 0.*give key_padding_mask\.bool"),
])  # fmt: skip
def test_masks_that_do_not_fit_the_softmax_are_refused(given: dict[str, Any], text: str) -> None:
    softmax = Softmax(torch.ones(1, 2, 2, dtype=torch.int64), 16)
    with pytest.raises(UsageError, match=text):
        softmax(torch.zeros(2, 4, 16, 16), **given)


def test_a_module_made_in_inference_mode_serves_in_it() -> None:
    with torch.inference_mode():
        module = SparseSelfAttention(FixedSparsityConfig(2, 16))
        assert module(*[torch.ones(1, 2, 32, 16)] * 3).shape == (1, 2, 32, 16)


def test_the_three_products_are_self_attention() -> None:
    layout, (query, key, value) = random_layout(), operands()
    scores = MatMul(layout, BLOCK, "sdd", trans_b=True)(query, key)
    got = MatMul(layout, BLOCK, "dsd")(Softmax(layout, BLOCK)(scores, DIM**-0.5), value)
    close(got, SparseSelfAttention(TensorSparsityConfig(layout, BLOCK), max_seq_length=LENGTH)(query, key, value))


# BERT and RoBERTa


def bert(kind: str = "Bert") -> Any:
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=50, hidden_size=32, num_hidden_layers=2, intermediate_size=64,
                                                    num_attention_heads=4, max_position_embeddings=40)
    return getattr(transformers, f"{kind}ForMaskedLM")(config).eval()


def tokens(length: int) -> Tensor:
    return torch.randint(2, 50, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("kind", "reserved"), [("Bert", 0), ("Roberta", 2)])
def test_extended_positions_repeat_those_of_the_model(kind: str, reserved: int) -> None:
    model = bert(kind)
    inner = getattr(model, kind.lower())
    before = inner.embeddings.position_embeddings.weight.detach().clone()
    assert SparseAttentionUtils.extend_position_embedding(model, 128) is model
    after = inner.embeddings.position_embeddings.weight
    had = 40 - reserved
    assert after.shape == (128 + reserved, 32) and after.requires_grad
    assert torch.equal(after[:40], before)
    assert torch.equal(after[40:40 + had], before[reserved:])
    assert model.config.max_position_embeddings == 128 + reserved
    assert model(input_ids=tokens(128)).logits.shape == (2, 128, 50)
    with pytest.raises(ValueError, match="the model has 128; give more"):
        SparseAttentionUtils.extend_position_embedding(model, 100)
    with pytest.raises(ValueError, match="extend_position_embedding: max_position is a whole number; got '256'"):
        SparseAttentionUtils.extend_position_embedding(model, "256")  # pyright: ignore


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_a_replaced_model_keeps_its_weights_and_dense_logits(kind: str) -> None:
    model = SparseAttentionUtils.extend_position_embedding(bert(kind), 128)
    names, expected = list(model.state_dict()), model(input_ids=tokens(100)).logits
    replace = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention
    assert replace(model, 128, DenseSparsityConfig(4)) is model
    close(model(input_ids=tokens(100)).logits, expected)
    assert list(model.state_dict()) == names
    with pytest.raises(ValueError, match="the model has 128; call extend_position_embedding"):
        replace(model, 256)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_replaced_layers_are_sparse_modules_that_hide_padding(implementation: str) -> None:
    model, ids = bert(), tokens(32)
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    expected = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    query = model.bert.encoder.layer[0].attention.self.query
    layers = SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
        model.config, model.bert.encoder.layer, DenseSparsityConfig(4))
    assert isinstance(layers[0].attention.self, BertSparseSelfAttention) and layers[0].attention.self.query is query
    close(model(input_ids=ids, attention_mask=mask).logits[mask.bool()], expected)
    with pytest.raises(NotServed, match="of a decoder"):
        SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
            SimpleNamespace(is_decoder=True), layers)


def test_bert_attention_masks_padding_and_drops_in_training() -> None:
    config = SimpleNamespace(hidden_size=32, num_attention_heads=4, attention_probs_dropout_prob=0.5)
    torch.manual_seed(0)
    module = BertSparseSelfAttention(config, DenseSparsityConfig(4))
    assert [name for name, _ in module.named_children()] == ["query", "key", "value", "sparse_self_attention"]
    states, mask = draw(2, 32, 32), torch.zeros(2, 1, 1, 32)
    mask[:, ..., 20:] = -10_000.0
    dropped = module(states, mask)
    module.eval()
    other = states.clone()
    other[:, 20:] = 3.0
    whole = module(states, mask)
    close(module(other, mask)[:, :20], whole[:, :20])
    assert whole.shape == (2, 32, 32) and not torch.allclose(dropped, whole)


def test_padding_to_the_block_hides_what_it_adds_and_can_be_undone() -> None:
    ids, embeddings = tokens(50), nn.Embedding(50, 4)
    positions, types = torch.arange(50).expand(2, -1), torch.ones(2, 50, dtype=torch.long)
    pad, padded, mask, kinds, places, embedded = SparseAttentionUtils.pad_to_block_size(
        16, ids, None, types, positions, embeddings(ids), 1, embeddings)
    assert pad == 14
    assert torch.equal(padded, F.pad(ids, (0, 14), value=1)) and torch.equal(kinds, F.pad(types, (0, 14)))
    assert torch.equal(places, F.pad(positions, (0, 14), value=1)) and torch.equal(embedded, embeddings(padded))
    assert mask.sum(1).tolist() == [50, 50] and mask.shape == (2, 64)
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(pad, embedded), embeddings(ids))
    same = SparseAttentionUtils.pad_to_block_size(10, ids, mask, None, None, None, 1, None)
    assert same[0] == 0 and same[1] is ids and same[2] is mask and same[3:] == (None, None, None)
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(0, ids), ids)


def test_updating_a_tokenizer_is_remembered_by_what_it_saves() -> None:
    tokenizer = SimpleNamespace(model_max_length=512, init_kwargs={"model_max_length": 512})
    assert SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 4096) is tokenizer
    assert tokenizer.model_max_length == tokenizer.init_kwargs["model_max_length"] == 4096
