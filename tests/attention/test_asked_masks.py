"""Whether a position sees later ones is what the model asked of its mask, not what its modules say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal import initialize
from shoal.attention import DenseSparsityConfig, LocalSlidingWindowSparsityConfig, register, use_sparse_attention
from shoal.attention.hugging_face import NAME
from shoal.errors import NotServed
from shoal.testing import run_ranks

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 50, "max_position_embeddings": 64}


def bigbird_pegasus() -> Any:
    """Return a causal decoder whose modules say that they are not causal."""
    return transformers.BigBirdPegasusForCausalLM(transformers.BigBirdPegasusConfig(
        vocab_size=50, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
        max_position_embeddings=64, dropout=0.0))


def aimv2() -> Any:
    """Return one that gives its attention the argument is_causal=False beside a causal mask."""
    return transformers.Aimv2TextModel(transformers.Aimv2TextConfig(**TEXT, eos_token_id=2))


def clap() -> Any:
    """Return a bidirectional encoder whose modules say nothing."""
    return transformers.ClapTextModel(transformers.ClapTextConfig(
        **TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def evaluated(model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
    output = model(input_ids=ids, attention_mask=mask)
    return getattr(output, "logits", output[0]).detach()


@pytest.mark.parametrize("build", [bigbird_pegasus, aimv2, clap])
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_sees_what_it_asked_to_see(build: Any, padded: bool) -> None:
    torch.manual_seed(0)
    model = build().eval()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.3)
    ids = torch.randint(3, 50, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    given, real = (mask, mask.bool()) if padded else (None, torch.ones_like(mask, dtype=torch.bool))
    model.set_attn_implementation("eager")
    expected = evaluated(model, ids, given)
    use_sparse_attention(model, DenseSparsityConfig(4, 16))
    torch.testing.assert_close(evaluated(model, ids, given)[real], expected[real], rtol=1e-4, atol=1e-5)


def test_a_bidirectional_encoder_is_no_decoder_though_its_modules_say_so() -> None:
    from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalVisionModel

    kind = type(transformers.Phi4MultimodalConfig().vision_config)
    torch.manual_seed(0)
    model = Phi4MultimodalVisionModel(kind(**SIZES, image_size=56, patch_size=14, crop_size=56)).eval()
    images, seen = torch.randn(2, 3, 56, 56), torch.ones(2, 4, 4, dtype=torch.bool)
    seen[0, 2:] = False
    for patches in (None, seen):
        model.set_attn_implementation("eager")
        expected = model(pixel_values=images, patch_attention_mask=patches).last_hidden_state[:, :8]
        use_sparse_attention(model, DenseSparsityConfig(4, 16))
        got = model(pixel_values=images, patch_attention_mask=patches).last_hidden_state[:, :8]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_model_whose_text_layers_attend_by_themselves_is_refused() -> None:
    model = transformers.GitForCausalLM(transformers.GitConfig(
        **TEXT, vision_config={**SIZES, "image_size": 32, "patch_size": 16}))
    with pytest.raises(NotServed, match=r"GitSelfAttention computes its attention by itself \(git.encoder.layer"):
        use_sparse_attention(model, DenseSparsityConfig(4, 16))


def bloom(implementation: str) -> Any:
    """Return a model that computes its attention by itself, which transformers does not ask for the name's sake."""
    return transformers.BloomForCausalLM._from_config(
        transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4), attn_implementation=implementation)


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_that_would_read_the_mask_as_another_is_refused(padded: bool) -> None:
    register(LocalSlidingWindowSparsityConfig(4, 16))
    ids = torch.ones(2, 32, dtype=torch.long)
    with pytest.raises(NotServed, match="the model of this BloomConfig computes its attention by itself"):
        bloom(NAME)(input_ids=ids, attention_mask=torch.ones_like(ids) if padded else None)


def initialize_by_name() -> list[str]:
    """Return what `initialize` says of models that have the attention by its name, and could not have it otherwise."""
    register(LocalSlidingWindowSparsityConfig(4, 16))
    said = []
    config = transformers.DebertaV2Config(**TEXT)
    for model in (bloom(NAME), transformers.DebertaV2ForMaskedLM._from_config(config, attn_implementation=NAME)):
        with pytest.raises(NotServed) as raised:
            initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}})
        said.append(str(raised.value))
    return said


def test_a_name_that_a_model_ignores_is_refused_by_initialize() -> None:
    for said, model in zip(run_ranks(1, initialize_by_name)[0], ("BloomForCausalLM", "DebertaV2ForMaskedLM"), strict=True):
        assert said.startswith(f"attn_implementation='{NAME}': {model} computes no attention by the attention interface")
