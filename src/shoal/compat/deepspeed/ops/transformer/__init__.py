"""Fused transformer layers."""

from shoal.nn.transformer_layer import TransformerConfig as DeepSpeedTransformerConfig
from shoal.nn.transformer_layer import TransformerLayer as DeepSpeedTransformerLayer

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"]
