"""Attention over split sequences, in chunks that rest on the host."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "split the sequence by DistributedAttention, and rest activations by activation_checkpointing"
FPDT_Attention = unsupported_class("FPDT_Attention", _INSTEAD)
FPDT_FFN = unsupported_class("FPDT_FFN", _INSTEAD)
FPDT_InputConstruct = unsupported_class("FPDT_InputConstruct", _INSTEAD)
FPDT_LogitsLoss = unsupported_class("FPDT_LogitsLoss", _INSTEAD)
SequenceChunk = unsupported_class("SequenceChunk", _INSTEAD)
