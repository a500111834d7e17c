"""Lightning's `DeepSpeedStrategy`: fit with a schedule and accumulation, save, resume, validate, and load one file; and
manual optimization, which takes the same steps.

The published strategy asks for CUDA. Without it the checks of the device and of its number are passed over, and everything
else runs as it is.
"""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch.utils.data import DataLoader, Subset

import tiny


class AnyDevice(DeepSpeedStrategy):
    """The strategy, on CPUs too."""

    def setup_environment(self) -> None:
        if torch.cuda.is_available():
            super().setup_environment()
        else:
            DDPStrategy.setup_environment(self)

    @property
    def root_device(self) -> torch.device:
        return super().root_device if torch.cuda.is_available() else torch.device("cpu", 0)

    def setup_distributed(self) -> None:
        if torch.cuda.is_available():
            super().setup_distributed()
        else:
            self.set_world_ranks()
            self._init_deepspeed_distributed()


class Module(lightning.LightningModule):
    """The tiny model, and the losses that it saw."""

    def __init__(self, args: Any):
        super().__init__()
        self.args = args
        self.model: Any = tiny.build(args)
        self.losses: list[float] = []
        self.validated: list[float] = []
        self.clock = tiny.Clock()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(self.trainer.strategy.reduce(loss.detach().float().clone(), reduce_op="mean").item())
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        loss = self.model(**batch).loss.float()
        self.validated.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.tick()


class Manual(Module):
    """The same training, whose script calls the optimizer by itself."""

    def __init__(self, args: Any):
        super().__init__(args)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        schedule: Any = self.lr_schedulers()
        schedule.step()
        return loss


def strategy(args: Any) -> Any:
    if args.own:
        from shoal.compat.lightning import ShoalStrategy

        return ShoalStrategy(stage=args.stage, offload=args.offload)
    return AnyDevice(stage=args.stage, offload_optimizer=args.offload, process_group_backend=None
                     if torch.cuda.is_available() else "gloo")


def trainer(args: Any, steps: int, folder: Any) -> lightning.Trainer:
    saving = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=args.steps // 2)
    return lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=args.devices, strategy=strategy(args),
        max_steps=steps, precision="bf16-true" if args.dtype == "bf16" else "32-true", gradient_clip_val=1.0,
        accumulate_grad_batches=args.accumulation, limit_val_batches=2, callbacks=[saving], logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False)


def plain_fit(args: Any, module: Module, data: DataLoader[Any]) -> list[float]:
    """Return the losses of a few steps without accumulation and clipping, which manual optimization leaves to the script."""
    fitted = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=args.devices, strategy=strategy(args),
        max_steps=4, precision="bf16-true" if args.dtype == "bf16" else "32-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False)
    fitted.fit(module, data)
    return module.losses


def main() -> None:
    warnings.simplefilter("ignore")
    args = tiny.arguments(own={"action": "store_true"}, devices={"type": int, "default": 1})
    folder = args.folder / f"lightning-{args.stage}-{args.dtype}"
    data = DataLoader(tiny.Sequences(4 * args.steps * args.accumulation), batch_size=4)
    evaluation = DataLoader(tiny.Sequences(8, seed=1), batch_size=4)
    first = Module(args)
    fitted = trainer(args, args.steps, folder)
    fitted.fit(first, data, evaluation)
    half = args.steps // 2 * args.accumulation
    assert len(first.losses) == args.steps * args.accumulation

    again = Module(args)  # Lightning resumes the counters and the weights; which data comes next is the script's to say
    rest = DataLoader(Subset(data.dataset, range(4 * half, 4 * args.steps * args.accumulation)), batch_size=4)
    trainer(args, args.steps, folder / "again").fit(again, rest, evaluation,
                                                    ckpt_path=str(folder / f"step={args.steps // 2}.ckpt"))
    assert again.losses == first.losses[half:], f"resumed {again.losses}, had {first.losses[half:]}"

    fitted.save_checkpoint(str(folder / "after.ckpt"))
    evaluations = [fitted.validate(module, evaluation, ckpt_path=str(folder / name), verbose=False)
                   for name in (f"step={args.steps}.ckpt", "after.ckpt") for module in (first, Module(args))]
    validated = evaluations[0]
    assert all(each == validated for each in evaluations), f"one checkpoint gives {evaluations}"
    tiny.report(losses=first.losses, resumed=again.losses, evaluated=validated[0]["val_loss"], seconds=first.clock.median)
    by_hand, by_trainer = (plain_fit(args, module, data) for module in (Manual(args), Module(args)))
    assert by_hand == by_trainer, f"manual optimization had {by_hand}, automatic {by_trainer}"
    fitted.strategy.barrier()
    if tiny.rank() == 0:
        shutil.rmtree(folder)


main()
