"""Sharding over groups of ranks, while a model is built."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "build within zero.Init; initialize shards over the groups of zero_optimization.mics_shard_size"
MiCS_Init = unsupported_class("MiCS_Init", _INSTEAD)
