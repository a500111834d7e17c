"""Fused transformer layers."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "use torch.nn.TransformerEncoderLayer, or torch.compile"
DeepSpeedTransformerConfig = unsupported_class("DeepSpeedTransformerConfig", _INSTEAD)
DeepSpeedTransformerLayer = unsupported_class("DeepSpeedTransformerLayer", _INSTEAD)
