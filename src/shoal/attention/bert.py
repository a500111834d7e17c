"""The published tools that give BERT and RoBERTa of transformers longer positions and block-sparse attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.attention.arguments import check_tensor, whole_number
from shoal.attention.hugging_face import Sparsity, is_model, use_sparse_attention
from shoal.attention.self_attention import BertSparseSelfAttention, value_of
from shoal.attention.sparsity import SparsityConfig
from shoal.attention.structures import FixedSparsityConfig
from shoal.errors import ConfigError, NotServed

__all__ = ["SparseAttentionUtils"]

_RESERVED = {"bert": 0, "roberta": 2}
"""Rows of the table of positions that belong to no position: RoBERTa counts from its padding index + 1."""

_FIXED = FixedSparsityConfig(num_heads=4)


class SparseAttentionUtils:
    """Functions under one name, as published."""

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> Any:
        """Let `model`, a BERT or RoBERTa, have `max_position` positions: those it has are repeated. Return the model.

        Raises ConfigError (a ValueError) for other models, and for fewer positions than it has.
        """
        config, embeddings, reserved = _parts(model, "extend_position_embedding")
        old: nn.Embedding = embeddings.position_embeddings
        had = old.num_embeddings - reserved
        max_position = whole_number("extend_position_embedding: max_position", max_position, error=ConfigError)
        if max_position <= had:
            raise ConfigError(f"extend_position_embedding: max_position: got {max_position}, the model has {had}; give more")
        weight = old.weight.detach()
        repeated = weight[reserved:].repeat(-(-max_position // had), 1)[:max_position]
        longer = nn.Embedding.from_pretrained(torch.cat([weight[:reserved], repeated]), freeze=not old.weight.requires_grad,
                                              padding_idx=old.padding_idx)
        embeddings.position_embeddings = longer
        rows = max_position + reserved
        embeddings.register_buffer("position_ids", torch.arange(rows, device=weight.device)[None], persistent=False)
        embeddings.register_buffer("token_type_ids", torch.zeros(1, rows, dtype=torch.long, device=weight.device),
                                   persistent=False)
        config.max_position_embeddings = rows
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Let a tokenizer of transformers give up to `max_position` tokens. Return it."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
            model: nn.Module, max_position: int, sparsity_config: Sparsity = _FIXED) -> Any:
        """Let the attention of `model`, a BERT or RoBERTa, be block-sparse for up to `max_position` positions. Return it.

        The weights stay, and so do their names. Raises ConfigError (a ValueError) for other models, and for more positions
        than the model has.
        """
        name = "replace_model_self_attention_with_sparse_self_attention"
        config, embeddings, reserved = _parts(model, name)
        has = embeddings.position_embeddings.num_embeddings - reserved
        max_position = whole_number(f"{name}: max_position", max_position, error=ConfigError)
        if max_position > has:
            raise ConfigError(f"{name}: max_position: got {max_position}, the model has {has}; call "
                              f"extend_position_embedding(model, {max_position}) first")
        config.max_position_embeddings = max_position + reserved
        use_sparse_attention(model, sparsity_config)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
            config: Any, layers: Any, sparsity_config: SparsityConfig = _FIXED) -> Any:
        """Put a `BertSparseSelfAttention` with its weights in the place of `attention.self` of each layer; return `layers`.

        Raises NotServed for the layers of a decoder, which are causal.
        """
        if value_of(config, "is_decoder", False):
            raise NotServed("replace_self_attention_layer_with_sparse_self_attention_layer: the layers are of a decoder, "
                            "whose masks are no padding; use shoal.attention.use_sparse_attention")
        for layer in layers:
            layer.attention.self = _SelfOfLayer(config, sparsity_config, layer.attention.self)
        return layers

    @staticmethod
    def pad_to_block_size(block_size: int, input_ids: Tensor | None, attention_mask: Tensor | None,
                          token_type_ids: Tensor | None, position_ids: Tensor | None, inputs_embeds: Tensor | None,
                          pad_token_id: int, model_embeddings: Any) -> tuple[int, Any, Any, Any, Any, Any]:
        """Pad the inputs of a model to a multiple of `block_size`: (number of added positions, and the inputs in order).

        Added positions are hidden: a mask is made where there is none. `model_embeddings` gives the embeddings of padding if
        `inputs_embeds` are given. Raises ConfigError where neither these nor `input_ids` are, and for a block below 1.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ConfigError("pad_to_block_size: got neither input_ids nor inputs_embeds; give one of them")
        block_size = whole_number("pad_to_block_size: block_size", block_size,
                                  "a whole number from 1, the block of the structure", least=1, error=ConfigError)
        for name, each in (("input_ids", input_ids), ("attention_mask", attention_mask), ("token_type_ids", token_type_ids),
                           ("position_ids", position_ids), ("inputs_embeds", inputs_embeds)):
            if each is not None:
                check_tensor(f"pad_to_block_size: {name}", each, "(batch, length), of embeddings (batch, length, hidden)")
        batch, length = given.shape[:2]
        missing = -length % block_size
        if not missing:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if attention_mask is None:
            attention_mask = torch.ones(batch, length, dtype=torch.long, device=given.device)
        if inputs_embeds is not None:
            padding = torch.full((batch, missing), pad_token_id, dtype=torch.long, device=given.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(padding)], dim=1)
        ids, types, positions = (None if each is None else F.pad(each, (0, missing), value=value) for each, value in (
            (input_ids, pad_token_id), (token_type_ids, 0), (position_ids, pad_token_id)))
        return missing, ids, F.pad(attention_mask, (0, missing)), types, positions, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Return the output (batch, length, ...) without the last `pad_len` positions."""
        return sequence_output[:, :sequence_output.shape[1] - pad_len]


class _SelfOfLayer(BertSparseSelfAttention):
    """The self attention of a layer of transformers, which passes more, and takes (context, probabilities)."""

    def __init__(self, config: Any, sparsity_config: SparsityConfig, replaced: Any):
        super().__init__(config, sparsity_config)
        self.query, self.key, self.value = replaced.query, replaced.key, replaced.value
        self.train(replaced.training)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None,  # pyright: ignore[reportIncompatibleMethodOverride]
                *others: Any, **more: Any) -> tuple[Tensor, None]:
        return super().forward(hidden_states, attention_mask), None


def _parts(model: nn.Module, name: str) -> tuple[Any, Any, int]:
    """Return the configuration and the embeddings of a BERT or RoBERTa, and the number of its reserved positions."""
    children = dict(model.named_children())
    if not is_model(model) or model.config.model_type not in _RESERVED:
        raise ConfigError(f"{name}: got a {type(model).__name__}; only BERT and RoBERTa of transformers are known here. For "
                          f"other models use shoal.attention.use_sparse_attention(model, sparsity)")
    kind: str = model.config.model_type
    inner: Any = children.get(kind, model)  # a BertForMaskedLM has a BertModel
    return model.config, inner.embeddings, _RESERVED[kind]
