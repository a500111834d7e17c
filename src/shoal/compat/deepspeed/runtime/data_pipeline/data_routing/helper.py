"""Layers that drop random tokens, in a model."""

from shoal.compat.unsupported import unsupported_function

_INSTEAD = "pass all tokens; progressive_layer_drop drops whole layers"
convert_to_random_ltd = unsupported_function("convert_to_random_ltd", _INSTEAD)
save_without_random_ltd = unsupported_function("save_without_random_ltd", _INSTEAD)
