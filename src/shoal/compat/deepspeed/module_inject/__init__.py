"""Replacement of layers by kernels of inference."""

from shoal.compat.unsupported import unsupported_function

_INSTEAD = "tensor_parallel.autotp_size slices layers for training"
replace_transformer_layer = unsupported_function("replace_transformer_layer", _INSTEAD)
revert_transformer_layer = unsupported_function("revert_transformer_layer", _INSTEAD)
set_autotp_mode = unsupported_function("set_autotp_mode", _INSTEAD)
