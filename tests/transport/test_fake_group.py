"""Rank 0 of eight that are not there takes the native branch of the collectives: no crash, and the right shapes and bytes.

torch's fake group sends nothing: it gives this rank its own values in place of the others', so numbers mean nothing here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shoal
from shoal.testing import run_ranks
from shoal.transport import collectives

RANKS, WIDTH, BLOCKS = 8, 24, 3


def _trained(stage: int, more: dict[str, Any]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the shapes of the parameters after two steps, and the elements of the gradients of each unit's rest."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)])
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "log_level": "error", "timeout": 20,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more})[0]
    dtype = torch.bfloat16 if "bf16" in more else torch.float32
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean())
        engine.step()
    assert engine.sharded is not None
    masters = [unit.state.master.tensor.numel() for unit in engine.sharded.units]
    with shoal.gathered(model):
        return [tuple(parameter.shape) for parameter in model.parameters()], masters


def _gathered_from() -> list[bool]:
    """Return for each gather of a forward whether a rank's own part is read outside the buffer that is filled."""
    found: list[bool] = []
    gather = collectives.native_all_gather

    def watched(full: Tensor, own: Tensor, *more: Any, **named: Any) -> Any:
        found.append(own.untyped_storage().data_ptr() != full.untyped_storage().data_ptr())
        return gather(full, own, *more, **named)

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    engine = shoal.initialize(model=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), config={
        "train_micro_batch_size_per_gpu": 2, "log_level": "error", "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})[0]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(collectives, "native_all_gather", watched)
        engine(torch.ones(2, WIDTH))
    return found


def test_a_device_gathers_a_rank_s_part_from_where_it_rests() -> None:
    found, = run_ranks(1, _gathered_from)
    assert found and all(found), "no copy of it precedes the gather"


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}, {"gradient_accumulation_steps": 2}],
                         ids=["fp32", "bf16", "accumulation"])
@pytest.mark.parametrize("stage", range(4))
def test_the_native_branch_runs_as_one_of_eight_ranks(stage: int, more: dict[str, Any]) -> None:
    (shapes, masters), = run_ranks(1, _trained, stage, more)
    assert shapes == [(WIDTH, WIDTH), (WIDTH,)] * BLOCKS
    whole = BLOCKS * (WIDTH * WIDTH + WIDTH)
    assert whole // (RANKS if stage else 1) <= sum(masters) < whole // (RANKS if stage else 1) * 1.3
