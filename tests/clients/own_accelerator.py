"""`ShoalAccelerator` in a loop of Accelerate's: train, save, go on, and go back."""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader

import tiny
from shoal.compat.accelerate import ShoalAccelerator


def main() -> None:
    args: argparse.Namespace = tiny.arguments()
    accelerator = ShoalAccelerator(args.stage, args.offload, gradient_clipping=1.0,
                                   gradient_accumulation_steps=args.accumulation,
                                   mixed_precision="no" if args.dtype == "fp32" else args.dtype)
    model = tiny.build(args)
    data = DataLoader(tiny.Sequences(4 * args.steps * args.accumulation * accelerator.num_processes), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    clock = tiny.Clock()

    def epoch() -> list[float]:
        losses = []
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            clock.tick()
        return losses

    losses = epoch()
    accelerator.save_state(str(args.folder / "own"))
    again = epoch()
    accelerator.load_state(str(args.folder / "own"))
    assert epoch() == again, "resuming changed the losses"
    assert type(model).__module__.startswith("shoal."), type(model)
    tiny.report(losses=losses, resumed=again, seconds=clock.median)
    accelerator.end_training()


main()
