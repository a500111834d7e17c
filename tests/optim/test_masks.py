"""Elements that a mask leaves out never move, whatever signs say of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import ConfigError
from shoal.testing import run_ranks

from .signed import WARM, batch, engine_of, model

REACHED = 11
"""Rows of the first weight that have gradients."""


def groups(whole: nn.Module, mask: Tensor | None) -> list[dict[str, Any]]:
    first, *others = whole.parameters()
    return [{"params": [first], **({} if mask is None else {"exp_avg_mask": mask})}, {"params": others}]


def trained(kind: str, masked: bool, stage: int, folder: str) -> tuple[float, float]:
    """Train with gradients of the first rows, across a checkpoint; return how far the others' masters went, and theirs."""
    whole, mask = model(), torch.zeros(40, 1)
    mask[:REACHED] = 1
    start = next(whole.parameters()).detach().clone()
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5, "zero_optimization": {"stage": stage},
              "optimizer": {"type": kind, "params": {"lr": 1e-2, **WARM[kind]}}}
    engine = shoal.initialize(model=whole, model_parameters=groups(whole, mask if masked else None), config=config)[0]
    for step in range(16):
        if step == 9:
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
            engine.load_checkpoint(folder)
        x, y = batch(step, engine.global_rank)
        reached = torch.cat([engine.module[0].weight[:REACHED], start[REACHED:]])
        hidden = nn.functional.linear(x, reached, engine.module[0].bias)
        loss = nn.functional.mse_loss(engine.module[3](engine.module[2](hidden.tanh())), y) + 0 * engine(x).sum()
        engine.backward(loss)
        engine.step()
    moved = torch.zeros(start.numel())
    for unit in engine.sharded.units if engine.sharded is not None else ():
        for part in unit.layout.parts(unit.master_span):
            if unit.layout.slots[part.slot].name == "0.weight" and unit.master is not None:
                length = part.stop - part.start
                here = unit.master[part.offset:part.offset + length] - start.flatten()[part.start:part.stop]
                moved[part.start:part.stop] = here.abs()
    return moved.view_as(start)[REACHED:].max().item(), moved.view_as(start)[:REACHED].max().item()


@pytest.mark.parametrize("kind", WARM)
def test_what_a_mask_leaves_out_stays_where_it_is(kind: str, tmp_path: Any) -> None:
    for stage in (0, 2):
        found = run_ranks(2, trained, kind, True, stage, str(tmp_path / f"{stage}"))
        assert max(out for out, _ in found) == 0 and max(kept for _, kept in found) > 1e-3
    found = run_ranks(2, trained, kind, False, 1, str(tmp_path / "without"))
    assert max(out for out, _ in found) > 0, "signs say something of every element"


def refused() -> list[str]:
    said: list[str] = []
    for mask in (torch.ones(3), 1.0):
        with pytest.raises(ConfigError) as caught:
            shoal.initialize(model=(whole := model()), model_parameters=groups(whole, mask), config={
                "train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 4}}})
        said.append(str(caught.value))
    engine_of()
    return said


def test_a_mask_that_does_not_fit_is_refused() -> None:
    wrong, number = run_ranks(2, refused)[0]
    assert "optimizer group 0: exp_avg_mask: got (3,) for '0.weight' of shape (40, 40)" in wrong
    assert "got float for '0.weight'" in number
