"""The variance that 1-bit optimizers estimate from compressed sums follows that of uncompressed sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.testing import run_ranks


def wide() -> nn.Module:
    return nn.Linear(256, 16, bias=False)


class ReplicatedBesideSliced(nn.Linear):
    """A layer that is replicated over the tensor ranks, beside an unused parameter that is sliced."""

    def __init__(self) -> None:
        super().__init__(256, 16, bias=False)
        self.cut = nn.Parameter(torch.ones(2))
        vars(self.cut).update(tensor_model_parallel=True, partition_dim=0)


class CalledTwice(nn.Module):
    """A layer that gets gradients at two times in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return sum((checkpoint(self.layer, x, use_reentrant=True) for _ in range(2)), torch.zeros(()))


def estimated_variance(steps: int, build: Callable[[], nn.Module], config: dict[str, Any]) -> tuple[float, float]:
    """Train on noise around a mean with compression; return the mean of the estimated variances, and its expectation."""
    torch.manual_seed(0)
    engine = shoal.initialize(model=build(), config={
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.0, "freeze_step": 1, "betas": [0.9, 0.98]}}} | config)[0]
    dtype, random = next(engine.module.parameters()).dtype, torch.Generator().manual_seed(1 + engine.communicator.rank)
    times, microbatches = 2 if build is CalledTwice else 1, engine.gradient_accumulation_steps()
    for _ in range(steps * microbatches):
        gradient = 0.5 + torch.randn(16, 256, generator=random)
        engine.backward((engine(torch.eye(256, dtype=dtype)).float().T * gradient).sum() / times)
        engine.step()
    assert engine.optimizer is not None
    found = torch.cat([state["exp_avg_sq"].flatten() for state in engine.optimizer.optimizer.state.values()])
    summed = engine.communicator.ranks if engine.settings.gradient_allreduce_op == "sum" else 1
    return found.mean().item(), (0.25 + 1 / (engine.communicator.ranks * microbatches)) * summed**2


@pytest.mark.parametrize(("ranks", "build", "config"), [
    (2, wide, {}), (4, wide, {}), (2, wide, {"gradient_accumulation_steps": 3}), (2, wide, {"gradient_allreduce_op": "sum"}),
    (2, wide, {"gradient_predivide_factor": 2.0}), (2, wide, {"communication_data_type": "fp16"}),
    (2, wide, {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 20}}),
    (2, CalledTwice, {}), (2, ReplicatedBesideSliced, {"mesh": {"tensor": 2}}),
    (4, ReplicatedBesideSliced, {"mesh": {"tensor": 2}}),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_variance_continues_under_compression_as_with_full_gradients(
        ranks: int, build: Callable[[], nn.Module], config: dict[str, Any]) -> None:
    for found, expected in run_ranks(ranks, estimated_variance, 120, build, config):
        assert found / (1 - 0.98**120) == pytest.approx(expected, rel=0.1)


def tied() -> list[tuple[str, bool]]:
    """Return "shared" or "own" for each unit of a pipeline, and whether it may be compressed."""
    layers = [shoal.TiedLayerSpec("words", nn.Linear, 8, 8), shoal.LayerSpec(nn.Linear, 8, 8),
              shoal.LayerSpec(nn.Linear, 8, 8), shoal.TiedLayerSpec("words", nn.Linear, 8, 8)]
    model = shoal.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 1}}})[0]
    assert engine.sharded is not None
    return [("shared" if unit.replica_group.spans_stages else "own", unit.transport.is_compressible)
            for unit in engine.sharded.trainable]


def test_weights_shared_by_pipeline_stages_are_reduced_uncompressed() -> None:
    found = [each for rank in run_ranks(4, tied) for each in rank]
    assert set(found) == {("shared", False), ("own", True)}
