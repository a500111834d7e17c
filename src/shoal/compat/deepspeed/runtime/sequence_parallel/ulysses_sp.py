"""Attention over split sequences for Hugging Face models."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "tensor_parallel splits sequences between its regions"
UlyssesSPAttentionHF = unsupported_class("UlyssesSPAttentionHF", _INSTEAD)
UlyssesSPDataLoaderAdapter = unsupported_class("UlyssesSPDataLoaderAdapter", _INSTEAD)
