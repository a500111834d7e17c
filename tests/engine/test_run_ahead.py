"""Weights on disk come ahead of their use, whoever had them last."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from shoal.testing import run_ranks
from shoal.zero.unit import Unit

from .test_tiers import ALL, engine_of, train


def brought_ahead(folder: str) -> list[bool]:
    """Take a step whose thread is done before the next forward begins; return of which units that waits for no read."""
    tier = {key: {**block, "buffer_count": 2} for key, block in ALL.items()}
    tier["offload_optimizer"]["step_in_backward"] = False
    engine = engine_of(folder, tier)
    train(engine, range(2))
    assert engine.optimizer is not None and engine.sharded is not None
    engine.optimizer._stepping._join()
    ahead: list[bool] = []
    for unit in engine.sharded.units[1:]:
        def arrives(module: nn.Module, args: object, unit: Unit = unit) -> None:
            ahead.append(unit.owed is None and not unit.is_released)

        engine.module.get_submodule(unit.name).register_forward_pre_hook(arrives, prepend=True)
    train(engine, range(2, 3))
    engine.destroy()
    return ahead


def test_units_that_were_stepped_long_ago_come_ahead_of_their_use(tmp_path: Path) -> None:
    [ahead] = run_ranks(1, brought_ahead, str(tmp_path))
    assert ahead == [True] * 2
