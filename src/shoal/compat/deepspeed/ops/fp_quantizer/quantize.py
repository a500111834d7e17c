"""Quantization to 4 to 12 bits."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "keep frozen weights in bf16; stage 3 shards them"
FP_Quantize = unsupported_class("FP_Quantize", _INSTEAD)
Quantizer = unsupported_class("Quantizer", _INSTEAD)
