"""Attention over split sequences for Hugging Face models."""

from shoal.compat.ulysses import UlyssesSPAttentionHF as UlyssesSPAttentionHF
from shoal.compat.ulysses import UlyssesSPDataLoaderAdapter as UlyssesSPDataLoaderAdapter
from shoal.compat.unsupported import unsupported_class

_INSTEAD = 'recompute the blocks that need memory: "activation_checkpointing": {"recompute": "full"}'
SequenceTiledCompute = unsupported_class("SequenceTiledCompute", _INSTEAD)
TiledMLP = unsupported_class("TiledMLP", _INSTEAD)
TiledFusedLogitsLoss = unsupported_class("TiledFusedLogitsLoss", _INSTEAD)
