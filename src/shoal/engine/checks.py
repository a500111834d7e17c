"""What state that travels as signs cannot be combined with, said before anything is built."""

from __future__ import annotations

from torch import nn

from shoal.engine.schema import Config
from shoal.errors import ConfigError, NotSupportedYet
from shoal.mesh.mesh import Mesh
from shoal.optim.compressed import CompressedOptimizer
from shoal.sparse.embeddings import Embeddings

__all__ = ["check_compressing", "check_warm_up"]

_WARM_UP = ("freeze_step", "var_update_scaler")
"""What optimizers call their warm-up."""


def check_compressing(settings: Config, mesh: Mesh, model: nn.Module, name: str) -> None:
    """Raise `ConfigError` for what the compressing optimizer `name` cannot serve, naming what it can.

    Whole weights are published as updates, so that they have to rest on every rank (stages 0 to 2), change nowhere else,
    and one owner has to have the sum of a slice.
    """
    zero = settings.zero_optimization
    if zero.stage == 3:
        raise ConfigError(f"zero_optimization.stage: got 3 with {name}: weights that are gathered for every use travel "
                          f"whole, twice a step, and no update of them can be sent instead; choose 0, 1 or 2 (each keeps "
                          f"masters and moments sharded with {name}), or AdamW at stage 3")
    if mesh.size("replica") > 1:
        raise ConfigError(f"zero_optimization.mics_shard_size: got {mesh.size('replica')} copies of the sharded state with "
                          f"{name}: the copies would add their sums uncompressed; leave it out")
    for key in ("offload_optimizer", "offload_param"):
        if getattr(zero, key).device != "none":
            raise NotSupportedYet(f"zero_optimization.{key}.device: got '{getattr(zero, key).device}' with {name}, whose "
                                  f"masters are compared with the weights at every step; leave it out, or take AdamW")
    if settings.sparse_gradients:
        raise ConfigError(f"sparse_gradients: got true with {name}, whose gradients travel whole, as signs: leave it out, "
                          f"and those of embeddings with sparse=True are made dense; or take AdamW or Adagrad with it")
    for path, module in model.named_modules():
        if isinstance(module, Embeddings) and module.max_norm is not None:
            raise ConfigError(f"embedding '{path}' has max_norm={module.max_norm:g} with {name}: it rewrites the rows that "
                              f"a rank looks up in that rank's copy of the weights alone, and copies that receive the same "
                              f"updates never meet again. Leave it out, and bound the rows in the forward instead")


def check_warm_up(optimizer: CompressedOptimizer, total: object) -> None:
    """Raise unless the warm-up ends before a training of `total` steps does, where that is a number."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if isinstance(total, int | float) and optimizer.warm_up(group) >= total:
            key = next(key for key in _WARM_UP if key in group)
            raise ConfigError(f"{name}: {key}: got {group[key]}, and the schedule has {total:g} steps: training would "
                              f"end before anything is compressed; give {max(1, int(total) // 5)}, a fifth of it")
