"""The portable state dict of an optimizer goes between stages, numbers of ranks, and plain torch optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import shoal
from shoal.errors import UsageError
from shoal.testing import run_ranks

STEPS = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 3))
    whole[2].requires_grad_(False)
    whole.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    return whole


def adam(whole: nn.Module) -> Optimizer:
    matrices = [p for p in whole.parameters() if p.dim() > 1]
    others = [p for p in whole.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01)


def loss(whole: nn.Module, module: Any, step: int) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    value = module(x).square().mean()
    return value * whole.get_parameter("scale") if step else value  # one step less of the scale


def plain(steps: int, state: dict[str, Any] | None = None,
          weights: dict[str, Tensor] | None = None) -> tuple[nn.Module, Optimizer]:
    whole = model()
    optimizer = adam(whole)
    if weights is not None and state is not None:
        whole.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for step in range(steps):
        loss(whole, whole, step if weights is None else step + STEPS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole, optimizer


def engine_of(stage: int, weights: dict[str, Tensor] | None = None) -> tuple[nn.Module, Any, Optimizer]:
    whole = model()
    if weights is not None:
        whole.load_state_dict(weights)
    optimizer = adam(whole)
    engine = shoal.initialize(model=whole, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "timeout": 20,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]
    return whole, engine, optimizer


def trained(stage: int, whole: nn.Module, engine: Any, optimizer: Optimizer, first: int) -> None:
    for step in range(first, first + STEPS):
        with shoal.gathered(whole.get_parameter("scale"), enabled=stage == 3):
            engine.backward(loss(whole, engine, step))
        optimizer.step()


def saved(folder: str, stage: int) -> None:
    whole, engine, optimizer = engine_of(stage)
    trained(stage, whole, engine, optimizer, 0)
    state, weights = optimizer.state_dict(), engine.consolidated_state_dict()
    assert bool(state["state"]) == (dist.get_rank() == 0) and len(state["param_groups"]) == 2
    if weights is not None:
        torch.save((state, weights), f"{folder}/state.pt")
    engine.destroy()


def resumed(folder: str, stage: int, name: str, *, everywhere: bool) -> dict[str, Tensor] | None:
    state, weights = torch.load(f"{folder}/{name}.pt")
    whole, engine, optimizer = engine_of(stage, weights)
    if dist.get_rank() and not everywhere:
        state = {"state": {}, "param_groups": state["param_groups"]}
    optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    trained(stage, whole, engine, optimizer, STEPS)
    found = engine.consolidated_state_dict()
    engine.destroy()
    return found


def save_at_all_stages(folder: str) -> None:
    for stage in range(4):
        Path(folder, str(stage)).mkdir(exist_ok=True)
        saved(f"{folder}/{stage}", stage)
    with pytest.raises(UsageError, match=r"rank 0: exp_avg of 0\.weight: got \(1,\), the parameter has \(7, 5\)"):
        _, _, optimizer = engine_of(3)
        state = plain(STEPS)[1].state_dict()
        state["state"][0]["exp_avg"] = torch.ones(1)
        optimizer.load_state_dict(state)


def resume_at_all_stages(folder: str, name: str) -> list[dict[str, Tensor] | None]:
    return [resumed(folder, stage, name, everywhere=stage % 2 == 0) for stage in range(4)]


def test_state_goes_between_stages_ranks_and_plain_torch(tmp_path: Path) -> None:
    whole, optimizer = plain(STEPS)
    expected = dict(plain(2 * STEPS)[0].state_dict())
    torch.save((optimizer.state_dict(), dict(whole.state_dict())), tmp_path / "torch.pt")
    run_ranks(2, save_at_all_stages, str(tmp_path))
    for stage in range(4):
        state, weights = torch.load(tmp_path / str(stage) / "state.pt")
        names = {p: name for name, p in whole.named_parameters()}
        for p, values in optimizer.state.items():
            for kind, value in values.items():
                torch.testing.assert_close(state["state"][names[p]][kind], value, rtol=1e-5, atol=1e-7)
        assert names.keys() - optimizer.state.keys() == {whole[2].weight, whole[2].bias}
        found = plain(STEPS, state, weights)[0].state_dict()
        torch.testing.assert_close(dict(found), expected, rtol=1e-5, atol=1e-6)
    for ranks, folder, name in ((1, str(tmp_path / "3"), "state"), (2, str(tmp_path), "torch")):
        for found in run_ranks(ranks, resume_at_all_stages, folder, name)[0]:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
