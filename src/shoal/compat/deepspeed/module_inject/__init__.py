"""Replacement of layers by fused ones, for training."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.compat.raising import published_errors
from shoal.compat.unsupported import unsupported_function
from shoal.errors import NotSupportedYet
from shoal.nn.injection import inject_transformer_layers, restore_transformer_layers

_READ_FROM_LAYERS = frozenset({
    "bert_config", "config", "fp16", "hidden_size", "huggingface", "local_rank", "max_seq_length", "micro_batch_size",
    "num_attention_heads", "preln", "seed", "stochastic_mode", "training"})
"""Options that describe the model, which the layers tell themselves."""


def replace_transformer_layer(orig_layer_impl: Any, model: nn.Module, **options: Any) -> nn.Module:
    """Let the BERT and GPT-2 layers of transformers in `model` compute by the fused layer; return the model.

    Parameters and state dict stay. Options that describe the model are accepted. Raises NotSupportedYet for those of
    inference, and for `training=False`.
    """
    with published_errors():
        other = sorted(name for name, value in options.items() if name not in _READ_FROM_LAYERS and value)
        if other or not options.get("training", True):
            raise NotSupportedYet(f"replace_transformer_layer: {', '.join(other) or 'training=False'}: only layers that "
                                  f"train are replaced; leave it out")
        inject_transformer_layers(model)
    return model


def revert_transformer_layer(orig_layer_impl: Any, model: nn.Module, config: Any = None, preln: bool = False) -> nn.Module:
    """Give the layers in `model` their own forward again; return the model."""
    restore_transformer_layers(model)
    return model


set_autotp_mode = unsupported_function("set_autotp_mode", "tensor_parallel.autotp_size slices layers for training")
