"""Models of transformers with block-sparse attention: the dense layout is SDPA, padding hides, caches change no token."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.attention import (
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    register,
    use_sparse_attention,
)
from shoal.attention.hugging_face import models_in
from shoal.attention.served_models import check_served
from shoal.errors import NotServed, UsageError

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER: dict[str, Any] = {**SIZES, "intermediate_size": 64, "max_position_embeddings": 140}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertForMaskedLM", ENCODER),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", ENCODER),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4,
                                               "n_positions": 140}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}),
}  # fmt: skip
CAUSAL = ("gpt2", "llama")
WINDOW = LocalSlidingWindowSparsityConfig(4, 16)


def build(name: str, **more: Any) -> Any:
    kind, model, sizes = MODELS[name]
    dropouts = {key: 0.0 for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "embd_pdrop", "resid_pdrop",
                                     "attn_pdrop", "attention_dropout")}
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes, **dropouts | more)
    return getattr(transformers, model)._from_config(config, attn_implementation="sdpa")


def tokens(length: int, batch: int = 2) -> Tensor:
    return torch.randint(2, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(length: int, *, left: bool) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :9] = 0
    return mask if left else mask.flip(1)


def passes(model: Any, ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the logits of the positions that are no padding, and the gradients of all parameters."""
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask).logits
    real = logits if mask is None else logits[mask.bool()]
    (real.float() ** 2).mean().backward()
    return [real.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def close(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)


def sparse(model: Any, sparsity: Any) -> Any:
    model = copy.deepcopy(model)
    use_sparse_attention(model, sparsity)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("length", "pad"), [(64, None), (53, None), (53, "right"), (64, "left"), (5, None)])
def test_the_dense_layout_gives_the_logits_and_gradients_of_sdpa(name: str, length: int, pad: str | None) -> None:
    model = build(name)
    mask = None if pad is None else padding(length, left=pad == "left")
    expected = passes(model, tokens(length), mask)
    close(passes(sparse(model, {"mode": "dense"}), tokens(length), mask), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_sparse_layout_is_sdpa_under_its_mask(name: str) -> None:
    length, structure = 75, BigBirdSparsityConfig(4, 16, different_layout_per_head=True)
    model = build(name)
    visible = structure.blocks(80, causal=name in CAUSAL).layout
    visible = visible.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :length, :length]
    if name in CAUSAL:
        visible = visible.tril()
    expected = passes(model, tokens(length), None)
    hidden: Any = visible[None].expand(2, -1, -1, -1)
    model.zero_grad()
    masked = model(input_ids=tokens(length), attention_mask=hidden).logits
    got = sparse(model, structure)(input_ids=tokens(length)).logits
    torch.testing.assert_close(got, masked, rtol=1e-4, atol=2e-6)
    assert not torch.allclose(got, expected[0], atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("left", [False, True])
def test_padding_changes_nothing_at_real_positions(name: str, left: bool) -> None:
    model = sparse(build(name), FixedSparsityConfig(4, 16, num_local_blocks=2))
    ids, mask = tokens(70), padding(70, left=left)
    other = ids.where(mask.bool(), 7)
    logits = [model(input_ids=each, attention_mask=mask).logits[mask.bool()] for each in (ids, other)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_sees_no_later_position(name: str) -> None:
    model = sparse(build(name), WINDOW)
    ids = tokens(60)
    changed = ids.clone()
    changed[:, 40:] = 7
    assert torch.equal(model(input_ids=ids).logits[:, :40], model(input_ids=changed).logits[:, :40])


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("left", [False, True])
def test_generation_over_a_cache_gives_the_tokens_of_whole_passes(name: str, cache: str | None, left: bool) -> None:
    model = sparse(build(name, initializer_range=0.5), WINDOW).eval()
    ids = tokens(41)
    mask = padding(41, left=True) if left else torch.ones_like(ids)
    plain: Any = {"do_sample": False, "max_new_tokens": 30, "min_new_tokens": 30, "pad_token_id": 0}
    expected = model.generate(input_ids=ids, attention_mask=mask, use_cache=False, **plain)
    got = model.generate(input_ids=ids, attention_mask=mask, cache_implementation=cache, **plain)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("structure", [
    WINDOW, BigBirdSparsityConfig(4, 16, num_random_blocks=2), VariableSparsityConfig(4, 16, num_random_blocks=2),
], ids=["window", "bigbird", "variable"])  # fmt: skip
def test_a_prompt_can_be_continued_in_pieces(name: str, structure: SparsityConfig) -> None:
    model = sparse(build(name, initializer_range=0.3), structure).eval()
    ids = tokens(130)
    whole = model(input_ids=ids).logits
    first = model(input_ids=ids[:, :96], use_cache=True)
    rest = model(input_ids=ids[:, 96:], past_key_values=first.past_key_values, use_cache=True).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole, rtol=1e-4, atol=1e-5)


def eager_under(model: Any, structure: SparsityConfig, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the logits of dense attention that sees what the causal `structure` and the padding show."""
    length, block = ids.shape[1], structure.block
    layout = structure.blocks(length + -length % block, causal=True).layout.bool()
    visible = layout.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :length, :length].tril()
    hidden: Any = visible & mask[:, None, None].bool()
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    added = torch.where(hidden.expand(len(ids), 4, -1, -1), 0.0, torch.finfo(torch.float32).min)
    return model(input_ids=ids, attention_mask=added, use_cache=False).logits


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pad", [None, "left", "right"])
@pytest.mark.parametrize("name", [*CAUSAL, "bert"])
@pytest.mark.parametrize("different", [False, True])
def test_pieces_over_a_cache_have_the_logits_of_eager(name: str, pad: str | None, cache: str, different: bool) -> None:
    if name == "bert":
        torch.manual_seed(0)
        config = transformers.BertConfig(**ENCODER, is_decoder=True, initializer_range=0.3)
        model = transformers.BertLMHeadModel._from_config(config, attn_implementation="sdpa").eval()
    else:
        model = build(name, initializer_range=0.3).eval()
    structure = BigBirdSparsityConfig(4, 16, different_layout_per_head=different, num_random_blocks=2)
    ids = tokens(131)
    mask = torch.ones_like(ids) if pad is None else padding(131, left=pad == "left")
    expected = eager_under(model, structure, ids, mask)
    model = sparse(model, structure)
    kept = (transformers.DynamicCache(config=model.config) if cache == "dynamic" else
            transformers.StaticCache(config=model.config, max_cache_len=139))
    got, seen = [], 0
    for each in ids.split([71, 33, 1, 17, 9], 1):
        seen += each.shape[1]
        positions: Any = {} if name == "llama" else {"position_ids": torch.arange(seen - each.shape[1], seen)[None]}
        got.append(model(input_ids=each, attention_mask=mask[:, :seen], past_key_values=kept, use_cache=True,
                         **positions).logits)
    torch.testing.assert_close(torch.cat(got, 1)[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


def largest_allocation(run: Callable[[], object]) -> int:
    """Return the most bytes that one operation of `run` allocates."""
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                                 profile_memory=True) as profile:
        run()
    return max(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_prompt_in_pieces_makes_no_tensor_of_length_x_length(cache: str) -> None:
    length = 2048
    model = sparse(build("llama", max_position_embeddings=length), BigBirdSparsityConfig(4, 16)).eval()
    kept = (transformers.DynamicCache(config=model.config) if cache == "dynamic" else
            transformers.StaticCache(config=model.config, max_cache_len=length + 8))
    pieces = tokens(length, batch=1).split(length // 2, 1)
    largest = largest_allocation(lambda: [model(input_ids=each, past_key_values=kept) for each in pieces])
    assert largest < length * length // 4  # bytes


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_step_over_a_cache_reads_the_blocks_of_its_row(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sparse(build("llama", max_position_embeddings=512), WINDOW).eval()
    kept = (transformers.DynamicCache(config=model.config) if cache == "dynamic" else
            transformers.StaticCache(config=model.config, max_cache_len=300))
    model(input_ids=tokens(260), past_key_values=kept)
    lengths: list[int] = []
    dense = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        lengths.append(key.shape[2])
        return dense(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model(input_ids=tokens(1), past_key_values=kept)
    assert lengths == [16 + 5] * 2  # the block before, and the five positions of its own


SLIDING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 40}),
    "gemma": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 40, "head_dim": 8}),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", {"attention_chunk_size": 64, "head_dim": 8, "num_local_experts": 2,
                                                         "intermediate_size_mlp": 64}),
}  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", SLIDING)
def test_a_sliding_cache_keeps_the_layout_at_its_positions(name: str, cache: str) -> None:
    kind, model_class, sizes = SLIDING[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES, intermediate_size=64, num_key_value_heads=2, initializer_range=0.3,
                                         max_position_embeddings=200, **sizes)
    model = sparse(getattr(transformers, model_class)._from_config(config, attn_implementation="sdpa"), WINDOW).eval()
    ids = tokens(120)
    whole = model(input_ids=ids, use_cache=False).logits
    kept = (transformers.DynamicCache(config=model.config) if cache == "dynamic" else
            transformers.StaticCache(config=model.config, max_cache_len=150))
    got = [model(input_ids=each, past_key_values=kept, use_cache=True).logits for each in ids.split([90, 5, 1, 1, 23], 1)]
    torch.testing.assert_close(torch.cat(got, 1), whole, rtol=1e-4, atol=1e-5)


def test_a_float_mask_of_the_caller_over_a_static_cache_finds_the_rows() -> None:
    model = sparse(build("llama", initializer_range=0.3), WINDOW).eval()
    ids = tokens(100)
    whole = model(input_ids=ids, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=140)
    model(input_ids=ids[:, :99], past_key_values=cache)
    seen = torch.where(torch.arange(140) <= 99, 0.0, torch.finfo(torch.float32).min).expand(2, 1, 1, 140)
    last = model(input_ids=ids[:, 99:], position_ids=torch.full((2, 1), 99), attention_mask=seen,
                 past_key_values=cache).logits
    torch.testing.assert_close(last, whole[:, 99:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padding_after_a_prompt_moves_no_row_of_the_layout(cache: str) -> None:
    model = sparse(build("llama", initializer_range=0.3), WINDOW).eval()
    ids, mask = tokens(96), torch.ones(2, 96, dtype=torch.long)
    mask[:, 70:] = 0  # in all samples: no query sees these keys
    whole = model(input_ids=ids[:, :70], use_cache=False).logits
    kept = (transformers.DynamicCache(config=model.config) if cache == "dynamic" else
            transformers.StaticCache(config=model.config, max_cache_len=128))
    parts = ((0, 48), (48, 96)) if cache == "dynamic" else ((0, 96),)
    got = [model(input_ids=ids[:, start:end], attention_mask=mask[:, :end], past_key_values=kept).logits
           for start, end in parts]
    torch.testing.assert_close(torch.cat(got, 1)[:, :70], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("boolean", [False, True])
def test_a_block_of_positions_that_see_each_other_keeps_its_rows(boolean: bool) -> None:
    model = sparse(build("llama", initializer_range=0.3), WINDOW).eval()
    ids, seen = tokens(128), torch.ones(128, 128, dtype=torch.bool).tril()
    seen[80:, 80:] = True  # an image among the tokens
    mask: Any = seen if boolean else torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    mask = mask[None, None].expand(2, 1, -1, -1)
    whole = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    cache = transformers.DynamicCache(config=model.config)
    first = model(input_ids=ids[:, :80], attention_mask=mask[:, :, :80, :80], past_key_values=cache).logits
    rest = model(input_ids=ids[:, 80:], attention_mask=mask[:, :, 80:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [48, 53])
@pytest.mark.parametrize("kind", ["added", "bool", "one for all samples", "of heads"])
def test_a_mask_that_is_alike_for_all_queries_is_taken(kind: str, length: int) -> None:
    model, seen = build("bert"), padding(length, left=False).bool()[:, None, None]
    mask: Any = seen if kind == "bool" else torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    if kind == "one for all samples":
        mask = mask[:1]
    if kind == "of heads":
        mask = mask + torch.randn(1, 4, 1, length, generator=torch.Generator().manual_seed(2))
    expected = model(input_ids=tokens(length), attention_mask=mask).logits
    got = sparse(model, DenseSparsityConfig(4, 16))(input_ids=tokens(length), attention_mask=mask).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("mask", [
    torch.ones(1, 53, 53).tril().bool(), torch.ones(1, 53, 53).tril(), torch.ones(1, 1, 53, 53).tril().long(),
    torch.ones(1, 1, 1, 53).long()])
def test_a_mask_of_other_dims_or_whole_numbers_is_refused(name: str, mask: Tensor) -> None:
    model = sparse(build(name), DenseSparsityConfig(4, 16))
    with pytest.raises(UsageError, match=r"the mask is \(1, .*53\) of torch.*; give \(batch, length\) of 0 and 1, or"):
        model(input_ids=tokens(53, batch=1), attention_mask=mask)


def test_a_padding_mask_that_is_too_short_hides_the_rest() -> None:
    model, mask = build("llama"), torch.ones(2, 41, dtype=torch.long)
    expected = model(input_ids=tokens(53), attention_mask=mask).logits
    got = sparse(model, DenseSparsityConfig(4, 16))(input_ids=tokens(53), attention_mask=mask).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6)


def test_packed_sequences_do_not_see_each_other() -> None:
    model = build("llama")
    ids, positions = tokens(64), torch.cat([torch.arange(30), torch.arange(34)])[None].expand(2, -1)
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    got = sparse(model, DenseSparsityConfig(4, 16))(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6)


def test_a_sliding_window_of_the_model_stays() -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 20}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes))
    close([sparse(model, DenseSparsityConfig(4, 16))(input_ids=tokens(50)).logits], [model(input_ids=tokens(50)).logits])


def test_attention_drops_in_training_alone_and_follows_the_seed() -> None:
    model = sparse(build("bert", attention_probs_dropout_prob=0.5), WINDOW)
    ids = tokens(64)

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(input_ids=ids).logits

    assert torch.equal(logits(1), logits(1)) and not torch.equal(logits(1), logits(2))
    model.eval()
    assert torch.equal(logits(1), logits(2))


def test_recompute_gives_the_same_gradients() -> None:
    model = sparse(build("llama", attention_dropout=0.3), WINDOW).train()
    ids = tokens(48)
    torch.manual_seed(3)
    expected = passes(model, ids, None)
    model.activation_checkpointing_enable()
    torch.manual_seed(3)
    close(passes(model, ids, None), expected)


def test_a_registered_name_works_from_pretrained_and_is_not_saved(tmp_path: Path) -> None:
    model = build("bert")
    register(WINDOW)
    model.save_pretrained(tmp_path)
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="shoal_sparse")
    ids = tokens(64)
    close([loaded.eval()(input_ids=ids).logits], [sparse(model, WINDOW).eval()(input_ids=ids).logits])
    loaded.save_pretrained(tmp_path)
    assert "shoal_sparse" not in (tmp_path / "config.json").read_text()


def test_a_configuration_takes_the_attention_along(tmp_path: Path) -> None:
    model, ids = build("bert").eval(), tokens(80)
    swapped = sparse(model, WINDOW)
    swapped.save_pretrained(tmp_path)
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    close([loaded.eval()(input_ids=ids).logits], [model(input_ids=ids).logits])
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path, config=pickle.loads(pickle.dumps(swapped.config)))
    close([loaded.eval()(input_ids=ids).logits], [swapped(input_ids=ids).logits])


_LOADS = """
import sys, torch
from shoal.attention import DenseSparsityConfig, use_sparse_attention
from tests.attention.test_hugging_face import build, tokens
other = build("bert")
use_sparse_attention(other, DenseSparsityConfig(4, 16))
model = torch.load(sys.argv[1], weights_only=False)
torch.save(model(input_ids=tokens(80)).logits, sys.argv[1])
"""


@pytest.mark.parametrize("sparsity", [WINDOW, MappingProxyType({"mode": "local_sliding_window", "block": 16})],
                         ids=["structure", "section"])
def test_a_pickled_model_keeps_its_structure_elsewhere(sparsity: Any, tmp_path: Path) -> None:
    model, ids = sparse(build("bert").eval(), sparsity), tokens(80)
    torch.save(model, tmp_path / "model.pt")
    subprocess.run([sys.executable, "-c", _LOADS, str(tmp_path / "model.pt")], check=True)
    assert torch.equal(torch.load(tmp_path / "model.pt"), model(input_ids=ids).logits)


def test_a_pickle_beside_its_model_has_the_structure_of_its_time() -> None:
    structure, ids = LocalSlidingWindowSparsityConfig(4, 16), tokens(80)
    model = sparse(build("bert").eval(), structure)
    before = model(input_ids=ids).logits
    pickled = pickle.dumps(model)
    structure.num_sliding_window_blocks = 1
    assert not torch.equal(model(input_ids=ids).logits, before)
    assert torch.equal(pickle.loads(pickled)(input_ids=ids).logits, before)
    assert copy.deepcopy(model).config._attn_implementation is model.config._attn_implementation


def test_two_models_have_structures_of_their_own() -> None:
    model = build("bert")
    narrow, wide = sparse(model, WINDOW), sparse(model, DenseSparsityConfig(4, 16))
    assert not torch.allclose(narrow(input_ids=tokens(80)).logits, wide(input_ids=tokens(80)).logits, atol=1e-4)


def test_bf16_models_stay_in_bf16() -> None:
    model = sparse(build("llama").bfloat16(), WINDOW)
    assert model(input_ids=tokens(40)).logits.dtype == torch.bfloat16


def test_other_models_are_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="is no model of Hugging Face"):
        use_sparse_attention(torch.nn.Linear(2, 2), WINDOW)
    with pytest.raises(NotImplementedError, match="choose dense, fixed"):
        use_sparse_attention(build("bert"), {"mode": "unknown"})
    model = sparse(build("bert"), FixedSparsityConfig(8, 16, different_layout_per_head=True))
    with pytest.raises(UsageError, match="for 8 heads, the model has 4"):
        model(input_ids=tokens(64))


def test_a_transformers_with_other_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def sdpa_mask(batch_size: int, cache_position: Tensor, kv_length: int) -> None: ...

    monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", sdpa_mask)
    with pytest.raises(UsageError, match=r"got transformers .*; install transformers>=5\.4"):
        register(WINDOW, name="shoal_of_an_old_library")


def test_cross_attention_is_refused() -> None:
    torch.manual_seed(0)
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32,
                                     decoder_ffn_dim=32, **heads)
    model = transformers.BartModel(config)
    before = model.config._attn_implementation
    with pytest.raises(NotServed, match=r"the configuration of BartModel declares cross attention .*'sdpa'"):
        use_sparse_attention(model, WINDOW)
    assert model.config._attn_implementation == before, "a model that is refused keeps its attention"
    register(WINDOW)
    model.set_attn_implementation("shoal_sparse")
    with pytest.raises(NotServed, match=r"belongs to a model with cross attention.*'sdpa'"):
        model(input_ids=tokens(32))


def test_the_encoder_of_an_encoder_decoder_is_served_by_itself() -> None:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(vocab_size=50, d_model=32, encoder_layers=1, encoder_attention_heads=4,
                                        encoder_ffn_dim=32, num_mel_bins=8, max_source_positions=50, pad_token_id=0)
    model = transformers.WhisperForAudioClassification(config).eval()
    sounds = torch.randn(2, 8, 100)
    close([sparse(model, DenseSparsityConfig(4, 16))(sounds).logits], [model(sounds).logits])


def test_a_decoder_that_never_calls_its_cross_attention_is_served() -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(vocab_size=50, d_model=32, decoder_layers=1, decoder_ffn_dim=32, dropout=0.0,
                                     decoder_attention_heads=4, max_position_embeddings=80)
    model = transformers.BartForCausalLM(config).eval()
    close([sparse(model, DenseSparsityConfig(4, 16))(input_ids=tokens(60)).logits], [model(input_ids=tokens(60)).logits])


def test_cross_attention_that_no_configuration_declares_is_refused() -> None:
    former = transformers.Blip2QFormerModel(transformers.Blip2QFormerConfig(**ENCODER, encoder_hidden_size=32))
    before = former.config._attn_implementation
    with pytest.raises(NotServed, match=r"Blip2QFormerModel has cross attention \(encoder.layer.0.crossattention\)"):
        use_sparse_attention(former, WINDOW)
    assert former.config._attn_implementation == before, "a model that is refused keeps its attention"
    register(WINDOW)
    former.set_attn_implementation("shoal_sparse")
    with pytest.raises(NotServed, match="has 8 queries and 20 keys, and is not causal: cross attention or a prefix"):
        former(query_embeds=torch.zeros(1, 8, 32), encoder_hidden_states=torch.zeros(1, 20, 32))


def test_a_model_that_chooses_keys_itself_is_refused() -> None:
    config = transformers.DogeConfig(**SIZES, intermediate_size=64, num_key_value_heads=2, head_dim=8)
    with pytest.raises(NotServed, match=r"DogeAttention chooses the keys of each query itself \(layers.0.self_attn\)"):
        use_sparse_attention(transformers.DogeModel(config), WINDOW)


def test_no_attention_is_taken_for_causal_that_does_not_say_so() -> None:
    register(DenseSparsityConfig(4, 16))
    attention = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["shoal_sparse"]
    operands, module = (torch.randn(2, 4, 32, 8) for _ in range(3)), torch.nn.Identity()
    query, key, value = operands
    for mask in (None, torch.ones(2, 32)):
        with pytest.raises(NotServed, match=r"Identity does not say whether it is causal; set is_causal"):
            attention(module, query, key, value, mask)
    module.is_causal = True
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    close([attention(module, query, key, value, None)[0].transpose(1, 2)], [expected])


class Wrapper(torch.nn.Module):
    """A module that passes on the attributes of the model within it, as PEFT's do."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


def test_the_model_within_a_wrapper_takes_the_attention() -> None:
    model = build("llama")
    assert [*models_in(Wrapper(model))] == [*models_in(torch.nn.DataParallel(model))] == [model]
    expected = sparse(model, WINDOW)(input_ids=tokens(64)).logits
    use_sparse_attention(Wrapper(model), WINDOW)
    close([model(input_ids=tokens(64)).logits], [expected])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_model_makes_its_layouts_outside_of_graphs() -> None:
    torch._dynamo.reset()
    model = build("llama")
    mask = padding(100, left=True)
    for structure in (BigBirdSparsityConfig(4, 16), Custom(4, 16)):
        changed = sparse(model, structure)
        compiled = torch.compile(changed, backend="aot_eager")(input_ids=tokens(100), attention_mask=mask, use_cache=False)
        real = mask.bool()
        close([compiled.logits[real]], [changed(input_ids=tokens(100), attention_mask=mask).logits[real]])


class Custom(SparsityConfig):
    """A structure of one's own."""

    def make_layout(self, seq_len: int) -> Tensor:
        return torch.ones(self.num_heads, seq_len // self.block, seq_len // self.block).tril()


def test_a_model_that_reads_four_dims_of_a_mask_is_refused() -> None:
    lasr = transformers.LasrEncoder(transformers.LasrEncoderConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48,
        num_mel_bins=16, subsampling_conv_channels=16))
    with pytest.raises(NotServed, match=r"LasrEncoderConvolutionModule \(layers.0.conv\) reads a mask of each query"):
        use_sparse_attention(lasr, WINDOW)
    indexed = transformers.HYV4ForCausalLM(transformers.HYV4Config(
        vocab_size=31, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, pad_token_id=0,
        bos_token_id=1, eos_token_id=2))
    with pytest.raises(NotServed, match="HYV4Attention chooses the keys of each query itself"):
        use_sparse_attention(indexed, WINDOW)


def test_a_model_without_attention_is_refused() -> None:
    model = transformers.FNetModel(transformers.FNetConfig(
        vocab_size=31, hidden_size=32, num_hidden_layers=1, intermediate_size=48))
    with pytest.raises(NotServed, match="FNetModel computes no attention by the attention interface of transformers"):
        use_sparse_attention(model, WINDOW)


@pytest.mark.parametrize("name", ["block_indices", "indices", "s_aux", "sinks", "softcap"])
def test_what_changes_the_result_of_attention_is_refused(name: str) -> None:
    with pytest.raises(NotServed, match=f"gives {name}, which this attention does not compute"):
        check_served("shoal_sparse", torch.nn.Identity(), {name: torch.ones(1)})


def test_a_structure_that_needs_more_blocks_is_dense() -> None:
    model = build("bert")
    structure: SparsityConfig = BigBirdSparsityConfig(4, 16)
    assert structure.shortest == 48
    close([sparse(model, structure)(input_ids=tokens(20)).logits], [model(input_ids=tokens(20)).logits])
