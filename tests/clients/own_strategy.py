"""`ShoalStrategy` takes the steps of Lightning's DDP: accumulation that does not divide the epoch or changes with it,
clipping of each form, averaged weights with BatchNorm. SGD, whose step is as large as the gradient."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tiny
from shoal.compat.lightning import ShoalStrategy
from shoal.errors import UsageError


class Module(lightning.LightningModule):
    """A small regression, and the losses that it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Manual(Module):
    """The same training, whose script clips and steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        optimizer.step()
        return loss


def fit(args: Any, strategy: Any, build: type[Module] = Module, **options: Any) -> tuple[list[float], int]:
    """Return the losses of three epochs of 8 batches, and the number of steps."""
    inputs = torch.randn(32 * args.devices, 8, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=args.devices, strategy=strategy, max_epochs=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options)
    module = build()
    trainer.fit(module, data)
    return module.losses, trainer.global_step


def main() -> None:
    warnings.simplefilter("ignore")
    args = tiny.arguments(devices={"type": int, "default": 1})
    cases: dict[str, Any] = {
        "accumulation": lambda: {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
        "schedule": lambda: {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})]}}
    if args.stage < 3:  # stage 3 has no whole weights to average, and no whole gradients to read
        cases["averages"] = lambda: {"callbacks": [StochasticWeightAveraging(0.05, swa_epoch_start=1)]}
        cases["by value"] = lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
        cases["by hand"] = lambda: {"build": Manual}
    for case, options in cases.items():
        losses, steps = fit(args, "ddp", **options())
        found, taken = fit(args, f"shoal_stage_{args.stage}", **options())
        assert taken == steps, f"{case}: {taken} steps, where DDP takes {steps}"
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=1e-4, msg=lambda text:
                                   f"{case}: the losses differ from DDP's: {text}")  # noqa: B023
        tiny.report(losses=losses)
    if args.stage == 3:
        losses, _ = fit(args, "ddp", Manual)
        found, _ = fit(args, ShoalStrategy(stage=3, config={"gradient_clipping": 0.2}), Manual)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=1e-4)
        try:
            fit(args, "shoal_stage_3", Manual)
        except UsageError as error:
            assert "gradient_clipping" in str(error), error
        else:
            raise AssertionError("stage 3 passed over clip_gradients in silence")


main()
