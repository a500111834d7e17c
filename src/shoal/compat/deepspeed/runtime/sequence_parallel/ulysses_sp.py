"""Attention over split sequences for Hugging Face models."""

from shoal.compat.ulysses import UlyssesSPAttentionHF as UlyssesSPAttentionHF
from shoal.compat.ulysses import UlyssesSPDataLoaderAdapter as UlyssesSPDataLoaderAdapter
from shoal.compat.unsupported import unsupported_class

SequenceTiledCompute = unsupported_class("SequenceTiledCompute", "take shoal.nn.in_tiles(module, x, rows=n)")
TiledMLP = unsupported_class("TiledMLP", "take shoal.nn.TiledMLP(module, rows=n)")
TiledFusedLogitsLoss = unsupported_class("TiledFusedLogitsLoss",
                                         "take shoal.nn.use_tiled_loss(model), or shoal.nn.tiled_head(head)")
