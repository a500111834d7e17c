"""Long sequences: attention over split ones for Hugging Face models, and computation over tiles."""

from shoal.compat.tiled import SequenceTiledCompute as SequenceTiledCompute
from shoal.compat.tiled import TiledFusedLogitsLoss as TiledFusedLogitsLoss
from shoal.compat.tiled import TiledMLP as TiledMLP
from shoal.compat.tiled import sequence_tiled_compute as sequence_tiled_compute
from shoal.compat.ulysses import UlyssesSPAttentionHF as UlyssesSPAttentionHF
from shoal.compat.ulysses import UlyssesSPDataLoaderAdapter as UlyssesSPDataLoaderAdapter
