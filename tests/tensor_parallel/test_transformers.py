"""Hugging Face transformers models sliced by their plans give the plain model's scores, losses and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.tensor_parallel import parallelize
from shoal.testing import run_ranks

from .test_layers import assert_equal, gradients, joined, world

transformers = pytest.importorskip("transformers", reason="needs Hugging Face transformers")

WORDS, LAYERS, HEADS, TOKENS = 50, 2, 4, (2, 8)  # 50 words: no multiple of 4

DECODER = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
           "num_attention_heads": 8, "num_key_value_heads": HEADS, "max_position_embeddings": 64, "pad_token_id": 0,
           "bos_token_id": None, "eos_token_id": None}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": WORDS, "n_embd": 32, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "bos_token_id": None,
        "eos_token_id": None}),
    "gpt2 untied": ("GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": WORDS, "n_embd": 32, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "bos_token_id": None,
        "eos_token_id": None, "tie_word_embeddings": False, "n_inner": 44}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "llama tied, biases": ("LlamaConfig", "LlamaForCausalLM", {
        **DECODER, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**DECODER, "sliding_window": 4}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**DECODER, "head_dim": 6, "tie_word_embeddings": True}),
    "bert": ("BertConfig", "BertForMaskedLM", {
        "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "max_position_embeddings": 64}),
}
DROPOUT = {"gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
           "bert": ("attention_probs_dropout_prob", "hidden_dropout_prob")}
SOME = ("gpt2", "qwen3", "bert")


def build(name: str, kind: str | None = None, *, dropout: float = 0.0, **options: Any) -> Any:
    config, model, given = MODELS[name]
    known = dict.fromkeys(DROPOUT.get(name.split()[0], ("attention_dropout",)), dropout)
    torch.manual_seed(1)
    return getattr(transformers, kind or model)(getattr(transformers, config)(**{**given, **known, **options}))


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, WORDS, TOKENS, generator=generator)
    mask = torch.ones(TOKENS, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def check(name: str, *, sequence_parallel: bool, recompute: bool = False, **options: Any) -> None:
    plain = build(name, **options)
    mine = parallelize(copy.deepcopy(plain), world(), sequence_parallel=sequence_parallel)
    if recompute:
        mine.gradient_checkpointing_enable()
        mine.train()
    wanted, found = plain(**batch()), mine(**batch())
    assert found.logits.shape == (*TOKENS, WORDS)
    torch.testing.assert_close(found.logits, wanted.logits)
    torch.testing.assert_close(found.loss, wanted.loss)
    wanted.loss.backward()
    found.loss.backward()
    assert_equal(joined(mine, gradients(mine)), gradients(plain))
    assert_equal(joined(mine, dict(mine.named_parameters(remove_duplicate=False))),
                 dict(plain.named_parameters(remove_duplicate=False)))


def parity(sequence_parallel: bool) -> None:
    for name in MODELS:
        check(name, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_sliced_model_equals_the_plain_one(ranks: int, sequence_parallel: bool) -> None:
    run_ranks(ranks, parity, sequence_parallel)


def recomputed() -> None:
    for name in SOME:
        check(name, sequence_parallel=True, recompute=True)
        check(name, sequence_parallel=False, recompute=True, attn_implementation="eager")


def test_recompute_and_other_attentions_change_nothing() -> None:
    run_ranks(2, recomputed)


def layers() -> None:
    """One layer: the split sequence begins and ends at the same module of BERT."""
    check("bert", sequence_parallel=True, num_hidden_layers=1)
    check("llama", sequence_parallel=True, num_hidden_layers=1)


def test_one_layer_is_enough() -> None:
    run_ranks(2, layers)


def others() -> None:
    """Model classes without a language-model head, or with another one, and cross attention."""
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(5))
    for name, kind, options, extra in (
            ("gpt2", "GPT2Model", {}, {}), ("llama", "LlamaForSequenceClassification", {}, {}),
            ("bert", "BertModel", {}, {}), ("bert", "BertForTokenClassification", {}, {}),
            ("bert", "BertForMaskedLM", {"tie_word_embeddings": False}, {}),
            ("gpt2", "GPT2LMHeadModel", {"add_cross_attention": True}, {"encoder_hidden_states": hidden}),
            ("bert", "BertLMHeadModel", {"add_cross_attention": True, "is_decoder": True},
             {"encoder_hidden_states": hidden})):
        plain = build(name, kind, **options).eval()
        mine = parallelize(copy.deepcopy(plain), world())
        given = {key: value for key, value in batch().items() if key != "labels"} | extra
        wanted, found = plain(**given)[0], mine(**given)[0]
        torch.testing.assert_close(found, wanted, msg=lambda text, kind=kind: f"{kind}: {text}")
        weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(6))
        (found * weight).mean().backward()
        (wanted * weight).mean().backward()
        assert_equal(joined(mine, gradients(mine)), gradients(plain))


def test_every_class_of_a_model_has_a_plan() -> None:
    run_ranks(2, others)


def dropped(name: str, sequence_parallel: bool) -> list[float]:
    """Return the losses of two passes with dropout."""
    mine = parallelize(build(name, dropout=0.3), world(), sequence_parallel=sequence_parallel).train()
    losses = [mine(**batch()).loss for _ in range(2)]
    losses[0].backward()
    joined(mine, gradients(mine))  # asserts that those of whole parameters have the same bits on all ranks
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_ranks_compute_one_loss_with_dropout(name: str, sequence_parallel: bool) -> None:
    mine, theirs = run_ranks(2, dropped, name, sequence_parallel)
    assert mine == theirs and mine[0] != mine[1]


def attention_masks(name: str) -> Tensor:
    """Return which attention probabilities of this rank's heads dropout sets to zero."""
    mine = parallelize(build(name, dropout=0.5, attn_implementation="eager"), world()).train()
    dropped = list[Tensor]()
    plain = torch.nn.functional.dropout

    def spy(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        result = plain(input, p, training, inplace)
        if input.ndim == 4:
            dropped.append(result == 0)
        return result

    torch.nn.functional.dropout = spy
    mine(**batch())
    return torch.stack(dropped)


@pytest.mark.parametrize("name", SOME)
def test_attention_dropout_differs_between_ranks(name: str) -> None:
    first, second = run_ranks(2, attention_masks, name)
    assert first.shape == second.shape and not torch.equal(first, second)


def heads(name: str, options: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        parallelize(build(name, **options), world())
    return str(caught.value)


def test_an_indivisible_number_of_heads_lists_numbers_that_divide() -> None:
    said = run_ranks(4, heads, "llama", {"num_key_value_heads": 2})[0]
    assert said == ("model.layers.0.self_attn.k_proj: 2 heads cannot be divided over 4 tensor ranks; make it a multiple of "
                    "4 (4), or use a number of ranks that divides 2: 1, 2")


def unknown() -> str:
    config = transformers.GPTNeoXConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
    with pytest.raises(UsageError) as caught:
        parallelize(transformers.GPTNeoXModel(config), world())
    return str(caught.value)


def test_a_model_without_a_plan_gets_the_list_of_plans() -> None:
    assert run_ranks(1, unknown) == [
        "parallelize: there is no plan for models of type 'gpt_neox'; there are plans for bert, gpt2, llama, mistral, "
        "qwen2, qwen3. Write one: Plan({name pattern: kind}), as docs/tensor_parallel.md shows"]
