"""What state that travels as signs cannot be combined with, said before anything is built."""

from __future__ import annotations

from shoal.errors import ConfigError, NotSupportedYet
from shoal.mesh import Mesh
from shoal.schema import Config

__all__ = ["check_compressing"]

_WARM_UP = ("freeze_step", "var_update_scaler")


def check_compressing(settings: Config, mesh: Mesh) -> None:
    """Raise `ConfigError` for what a compressing optimizer cannot serve, naming what it can.

    Whole weights are published as updates, so that they have to rest on every rank (stages 0 to 2), and one owner has to
    have the sum of a slice.
    """
    name, zero = settings.optimizer.type, settings.zero_optimization
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
    _check_warm_up(settings)


def _check_warm_up(settings: Config) -> None:
    """Raise unless the warm-up ends before training does, where its length is known."""
    total = settings.scheduler.params.get("total_num_steps")
    for key in _WARM_UP:
        steps = settings.optimizer.params.get(key)
        if settings.optimizer.type is None or not isinstance(total, int) or not isinstance(steps, int):
            continue
        if steps >= total:
            raise ConfigError(f"optimizer.params.{key}: got {steps}, and scheduler.params.total_num_steps {total}: "
                              f"training would end before anything is compressed; give {max(1, total // 5)}, a fifth of it")
