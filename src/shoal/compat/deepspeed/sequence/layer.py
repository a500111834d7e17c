"""Attention over split sequences."""

from shoal.compat.ulysses import DistributedAttention as DistributedAttention
from shoal.compat.ulysses import SeqAllToAll as _SeqAllToAll  # noqa: F401  # pyright: ignore[reportUnusedImport]  published
from shoal.compat.ulysses import single_all_to_all as single_all_to_all
