"""Layers that drop random tokens."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "pass all tokens; progressive_layer_drop drops whole layers"
RandomLayerTokenDrop = unsupported_class("RandomLayerTokenDrop", _INSTEAD)
