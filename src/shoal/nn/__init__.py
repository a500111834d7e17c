"""Layers that compute the same as torch's in less time and memory; each has a plain torch path, which is its oracle."""

from shoal.nn.causal_lm import use_tiled_loss
from shoal.nn.cross_entropy import cross_entropy
from shoal.nn.fused import rms_norm, rotary, swiglu
from shoal.nn.heads import TiledHead, TiledVocabularyHead, tiled_head
from shoal.nn.injection import inject_transformer_layers, restore_transformer_layers
from shoal.nn.linear import set_linear_kernels
from shoal.nn.passes import bias_gelu, dropout_add_norm, dropout_add_norm_with_sum
from shoal.nn.tiled_loss import TiledLoss, WordSlice, tiled_cross_entropy
from shoal.nn.tiled_module import TiledMLP, in_tiles
from shoal.nn.transformer_layer import TransformerConfig, TransformerLayer

__all__ = ["TiledHead", "TiledLoss", "TiledMLP", "TiledVocabularyHead", "TransformerConfig", "TransformerLayer",
           "WordSlice", "bias_gelu", "cross_entropy", "dropout_add_norm", "dropout_add_norm_with_sum", "in_tiles",
           "inject_transformer_layers", "restore_transformer_layers", "rms_norm", "rotary", "set_linear_kernels", "swiglu",
           "tiled_cross_entropy", "tiled_head", "use_tiled_loss"]
