"""Models of transformers on a sequence axis train as on one rank: dense and sparse, padded, with any number of key heads."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.attention import LocalSlidingWindowSparsityConfig, use_sparse_attention
from shoal.errors import NotServed, ShoalError
from shoal.sequence_parallel import SequenceAxis, cross_entropy
from shoal.sequence_parallel.hugging_face import use_sequence_attention
from shoal.testing import run_ranks

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "intermediate_size": 48, "max_position_embeddings": 128}
BIGBIRD = {"mode": "bigbird", "block": 16, "num_random_blocks": 0}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    match kind:
        case "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
        case "gpt2":
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(
                vocab_size=31, n_positions=128, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0))
        case "roberta":
            return transformers.RobertaForMaskedLM(transformers.RobertaConfig(
                **SIZES | {"max_position_embeddings": 130}, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
        case _:
            return transformers.BertForMaskedLM(transformers.BertConfig(
                **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def batch(step: int, padded: bool) -> dict[str, Tensor]:
    tokens = torch.randint(31, (2, 128), generator=torch.Generator().manual_seed(step))
    mask, labels = torch.ones_like(tokens), tokens.clone()
    if padded:
        tokens[0, 70:], mask[0, 70:], labels[0, 70:] = 1, 0, -100  # 1 is RoBERTa's padding token
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def train(kind: str, config: dict[str, Any], padded: bool) -> list[float]:
    engine = shoal.initialize(model=model_of(kind), config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}},
        "timeout": 60, **config})[0]
    losses: list[float] = []
    for step in range(2):
        whole = batch(step, padded)
        if kind in ("bert", "roberta"):
            split = "mesh" in config  # else the model makes its positions itself
            part = engine.split_sequence(whole, multiple=16, causal=False) if split else dict(whole)
            labels = part.pop("labels")
            loss = cross_entropy(engine(**part).logits, labels, engine.sequence)
        else:
            loss = engine(**(engine.split_sequence(whole, multiple=16) if "mesh" in config else whole), use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


CASES = [("llama", {}, True), ("llama", {"sparse_attention": BIGBIRD}, True), ("gpt2", {}, False),
         ("bert", {"sparse_attention": BIGBIRD}, True), ("roberta", {}, True)]


def train_all(extra: dict[str, Any]) -> list[list[float]]:
    return [train(kind, config | extra, padded) for kind, config, padded in CASES]


def test_models_train_as_on_one_rank() -> None:
    alone = run_ranks(1, train_all, {})[0]
    for ranks, stage in ((2, 3), (4, 1)):
        extra = {"mesh": {"sequence": ranks}, "zero_optimization": {"stage": stage}}
        for losses in run_ranks(ranks, train_all, extra):
            for case, got, expected in zip(CASES, losses, alone, strict=True):
                assert got == pytest.approx(expected, rel=2e-5), (case, ranks)


def refused() -> list[str]:
    config = {"train_micro_batch_size_per_gpu": 2, "timeout": 60, "mesh": {"sequence": 2},
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "sparse_attention": BIGBIRD}
    engine = shoal.initialize(model=model_of("llama"), config=config)[0]
    part = engine.split_sequence(batch(0, False), multiple=16)
    four = torch.ones(2, 1, 64, 64, dtype=torch.bool)
    packed = torch.arange(32).repeat(2)[None].expand(2, -1)
    calls = (lambda: engine(part["input_ids"], labels=part["labels"], position_ids=part["position_ids"]),
             lambda: engine(part["input_ids"], attention_mask=four),
             lambda: engine(part["input_ids"], position_ids=packed, use_cache=False),
             lambda: engine(part["input_ids"][:, :20]),
             lambda: use_sequence_attention(transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)),
                                            engine.sequence),
             lambda: use_sequence_attention(torch.nn.Linear(2, 2), engine.sequence))
    said: list[str] = []
    for call in calls:
        with pytest.raises(ShoalError) as found:
            call()
        said.append(str(found.value))
    return said


def test_what_cannot_be_split_is_refused() -> None:
    texts = ("got labels without shift_labels", "gives a mask or a bias of each query and key",
             "this model masks more than padding", "40 is no multiple of the block 16",
             "BertForSequenceClassification pools one position", "is no model of Hugging Face")
    for said, text in zip(run_ranks(2, refused)[0], texts, strict=True):
        assert text in said


def mixing(kind: str) -> Any:
    """Return a model that mixes positions outside of its attention, or counts them by itself."""
    match kind:
        case "convolution":
            return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(
                **SIZES, num_key_value_heads=2, layer_types=["conv", "full_attention"]))
        case "linear attention":
            return transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(
                **SIZES, num_key_value_heads=2, num_local_experts=2, layer_types=["linear_attention", "full_attention"]))
        case "trigrams":
            return transformers.MobileBertModel(transformers.MobileBertConfig(
                **SIZES, embedding_size=16, intra_bottleneck_size=32, num_feedforward_networks=1))
        case "positions":
            return transformers.MBartForCausalLM(transformers.MBartConfig(
                vocab_size=31, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48))
        case _:
            return transformers.FNetModel(transformers.FNetConfig(
                vocab_size=31, hidden_size=32, num_hidden_layers=1, intermediate_size=48))


@pytest.mark.parametrize(("kind", "text"), [
    ("convolution", r"Lfm2ForCausalLM mixes positions outside of its attention \(model.layers.0.conv.conv, Conv1d\)"),
    ("linear attention", r"mixes positions outside of its attention \(layers of the kind linear_attention\)"),
    ("trigrams", "trigram_input, which reads the embeddings of both neighbours"),
    ("positions", "MBartForCausalLM takes no position_ids, so that each rank would count the positions of its part from 0"),
    ("nothing", "FNetModel computes no attention")])
def test_models_that_need_more_than_their_part_are_refused(kind: str, text: str) -> None:
    axis: Any = None
    with pytest.raises(NotServed, match=text):
        use_sequence_attention(mixing(kind), axis)


class Wrapper(torch.nn.Module):
    """A module that passes on the attributes of the model within it, as PEFT's do."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.base_model = model

    def forward(self, **inputs: Any) -> Any:
        return self.base_model(**inputs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


def of_a_wrapper(ranks: int) -> float:
    config = {"train_micro_batch_size_per_gpu": 2, "timeout": 60, "mesh": {"sequence": ranks},
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = shoal.initialize(model=Wrapper(model_of("llama")), config=config)[0]
    whole = batch(0, False)
    whole["labels"][:, :70] = -100  # the first of two ranks has no labels at all
    part = engine.split_sequence(whole, multiple=16) if ranks > 1 else whole
    return engine(**part, use_cache=False).loss.item()


def test_the_loss_of_a_wrapped_model_is_of_the_whole_sequence() -> None:
    (expected,) = run_ranks(1, of_a_wrapper, 1)
    assert run_ranks(2, of_a_wrapper, 2) == [pytest.approx(expected, rel=2e-5)] * 2


def loaded() -> str:
    model = model_of("bert")
    use_sequence_attention(model, SequenceAxis(dist.group.WORLD))
    with pytest.raises(ShoalError) as found:
        pickle.loads(pickle.dumps(model))(input_ids=batch(0, False)["input_ids"])
    return str(found.value)


def test_a_pickled_model_has_no_sequence_axis() -> None:
    assert "call use_sequence_attention(model, axis) again" in run_ranks(1, loaded)[0]


def evaluated_whole() -> list[float]:
    axis = SequenceAxis(dist.group.WORLD)
    tokens = torch.randint(31, (2, 96), generator=torch.Generator().manual_seed(0))
    window = LocalSlidingWindowSparsityConfig(4, 16, 1)
    alone, split = model_of("llama").eval(), model_of("llama").eval()
    use_sparse_attention(alone, window)
    use_sequence_attention(split, axis, window, split_in_eval=False)
    apart = [float((alone(input_ids=tokens).logits - split(input_ids=tokens).logits).abs().max())]
    torch.manual_seed(0)
    plain = transformers.T5EncoderModel(transformers.T5Config(vocab_size=31, d_model=32, d_kv=8, d_ff=48, num_layers=2,
                                                              num_heads=4)).eval()
    biased = copy.deepcopy(plain)
    use_sequence_attention(biased, axis, split_in_eval=False)
    return [*apart, float((plain(input_ids=tokens)[0] - biased(input_ids=tokens)[0]).abs().max())]


def test_evaluation_of_whole_sequences_keeps_structure_and_bias() -> None:
    for apart in run_ranks(2, evaluated_whole):
        assert max(apart) < 1e-5
