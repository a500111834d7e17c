"""Quantization to 4 to 12 bits."""

from shoal.compat.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(("FP_Quantize", "Quantizer"), f"{__name__}.quantize"))
