"""Train with Ray Train: `TorchTrainer` starts the workers and sets torchrun's variables, and Shoal joins them.

    pip install 'ray[train]'
    python examples/cluster/ray_train.py --workers 2
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
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
    draw = torch.Generator().manual_seed(engine.global_rank)
    for step in range(settings["steps"]):
        x = torch.randn(32, 16, generator=draw).to(engine.device)
        loss = nn.functional.mse_loss(engine(x), x.norm(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        ray.train.report({"step": step, "loss": loss.item(), "ranks": torch.distributed.get_world_size()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(train, train_loop_config={"stage": options.stage, "steps": options.steps},
                               scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
                               run_config=RunConfig(storage_path=str(Path(folder).resolve())))
        result = trainer.fit()
    assert result.metrics is not None
    print(f"{result.metrics['ranks']} ranks, loss {result.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
