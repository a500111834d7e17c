"""Quantization during training."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "quantize with torch.ao, before initialize"
Quantizer = unsupported_class("Quantizer", _INSTEAD)
