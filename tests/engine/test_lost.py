"""An engine whose state cannot be read any more detaches all the same, and another one goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import shoal
from shoal.errors import TierError
from shoal.testing import run_ranks

from .test_tiers import ALL, build, config, engine_of, train, whole


def lost(folder: str, kind: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    disk, saved = Path(folder) / "disk", Path(folder) / "saved"
    disk.mkdir()
    engine = engine_of(str(disk), ALL)
    train(engine, range(2))
    engine.save_checkpoint(saved)
    kept, rest = engine.module, train(engine, range(2, 4))
    [file] = disk.rglob("*.swap")
    if kind == "deleted":
        file.unlink()
    else:
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(TierError):
        train(engine, range(4, 8))
    with pytest.raises(TierError):
        engine.destroy()
    assert any(parameter.isnan().all() for parameter in kept.parameters()), "what is lost does not look like weights"
    engine.destroy()  # there is nothing left to detach
    assert list(disk.iterdir()) == []
    losses, weights = list[float](), dict[str, Tensor]()
    for model in (kept, build()):
        again = shoal.initialize(model=model, config=config(str(disk), ALL))[0]
        again.load_checkpoint(saved)
        losses += train(again, range(2, 4))
        weights = whole(again)
        again.destroy()
    return rest, losses, weights


@pytest.mark.parametrize("kind", ["deleted", "changed"])
def test_who_lost_the_swap_file_goes_on_from_a_checkpoint_in_the_same_process(kind: str, tmp_path: Path) -> None:
    rest, losses, weights = run_ranks(1, lost, str(tmp_path), kind)[0]
    assert losses == 2 * rest
    assert all(torch.isfinite(weight).all() for weight in weights.values())
