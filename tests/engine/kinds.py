"""Twelve kinds of models, tiny, each with a batch and a loss as its users write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

transformers = pytest.importorskip("transformers", reason="needs Hugging Face transformers")

WORDS, LENGTH, SAMPLES = 32, 6, 2

Batch = dict[str, Tensor]


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.lstm(self.embed(input_ids))[0])
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Cnn(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
                                    nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(6, 4)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(self.head(self.layers(pixel_values).flatten(1)), labels)}


class LoraLinear(nn.Module):
    """A frozen layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16))


def lora() -> nn.Module:
    net = llama().requires_grad_(False)
    for layer in net.model.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)
        layer.mlp.down_proj = LoraLinear(layer.mlp.down_proj)
    return net


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=WORDS, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0))


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=4, d_model=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=8, max_target_positions=8,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, dropout=0.0))


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(transformers.MambaConfig(
        vocab_size=WORDS, hidden_size=8, state_size=4, num_hidden_layers=2, use_cache=False))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=1, max_position_embeddings=16,
        output_router_logits=True))


def words(step: int, rank: int) -> Batch:
    random = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=random)
    return {"input_ids": tokens, "labels": tokens}


def sentences(step: int, rank: int) -> Batch:
    return {"input_ids": words(step, rank)["input_ids"], "labels": torch.tensor([step % 4, rank])}


def pictures(step: int, rank: int) -> Batch:
    random = torch.Generator().manual_seed(100 * step + rank)
    return {"pixel_values": torch.randn(SAMPLES, 3, 8, 8, generator=random), "labels": torch.tensor([step % 4, rank])}


def sounds(step: int, rank: int) -> Batch:
    random = torch.Generator().manual_seed(100 * step + rank)
    return {"input_features": torch.randn(SAMPLES, 4, 16, generator=random), "labels": words(step, rank)["labels"]}


@dataclass(frozen=True)
class Kind:
    """A model with one loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]


KINDS: Mapping[str, Kind] = {
    "GPT-2": Kind(gpt2, words), "Llama": Kind(llama, words), "T5": Kind(t5, words), "BERT": Kind(bert, sentences),
    "ViT": Kind(vit, pictures), "Whisper": Kind(whisper, sounds), "Mamba": Kind(mamba, words),
    "Mixtral": Kind(mixtral, words), "LSTM": Kind(Lstm, words), "CNN": Kind(Cnn, pictures), "LoRA": Kind(lora, words),
}


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 6))

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(), nn.Linear(12, 1))

    def forward(self, samples: Tensor) -> Tensor:
        return self.layers(samples)


def truth_loss(logits: Tensor, *, real: bool) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def noise_and_samples(step: int, rank: int) -> tuple[Tensor, Tensor]:
    random: Any = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SAMPLES, 4, generator=random), torch.randn(SAMPLES, 6, generator=random)
