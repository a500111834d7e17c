"""Train with Ray Train: `TorchTrainer` starts the workers and sets torchrun's variables, and Shoal joins them.

    pip install 'ray[train]'
    python examples/cluster/ray_train.py --workers 2

Checkpoints are Shoal's own, in a folder that all workers see. Workers that Ray starts again after a failure go on
from the last one: `--fail-at 25` shows it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import shoal


def train(settings: dict[str, Any]) -> None:
    """Train on one worker; Ray has called torch.distributed.init_process_group already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    engine, *_ = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 32,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": settings["stage"]},
    })
    engine.load_checkpoint(settings["folder"])  # nothing is there at the first start
    began = engine.global_steps
    print(f"rank {engine.global_rank} begins at step {began}", flush=True)
    while engine.global_steps < settings["steps"]:
        draw = torch.Generator().manual_seed(engine.global_steps * engine.world_size + engine.global_rank)
        x = torch.randn(32, 16, generator=draw).to(engine.device)
        loss = nn.functional.mse_loss(engine(x), x.norm(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        if began == 0 and engine.global_steps == settings["fail_at"]:
            raise RuntimeError(f"rank {engine.global_rank} fails at step {engine.global_steps}, as asked")
        if engine.global_steps % settings["every"] == 0:
            engine.save_checkpoint(settings["folder"])
            ray.train.report({"step": engine.global_steps, "loss": loss.item()})
    engine.wait_for_checkpoint()
    if engine.global_rank == 0:
        Path(settings["folder"], "result").write_text(f"{engine.world_size} ranks, {engine.global_steps - began} steps from "
                                                      f"step {began}, loss {loss.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--fail-at", type=int, default=0, metavar="STEP", help="each worker fails there, the first time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train, train_loop_config={**vars(options), "folder": f"{folder}/checkpoints"},
            scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
            run_config=RunConfig(storage_path=str(Path(folder).resolve()), failure_config=FailureConfig(max_failures=1)))
        trainer.fit()
        print(Path(folder, "checkpoints", "result").read_text())


if __name__ == "__main__":
    main()
