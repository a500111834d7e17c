"""One rank of benchmarks/memory.py: it trains a few steps and reports the memory that it holds."""

from __future__ import annotations

import gc
from dataclasses import asdict
from pathlib import Path

import torch
from systems import ADAMW, BETAS
from torch import Tensor
from workloads import SEED, Workload, workload

import shoal

PRECISION: dict[str, dict[str, object]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1}},
}


def state(preset: str, stage: int, precision: str, steps: int) -> dict[str, int]:
    """Train for `steps` and return parameters, bytes of each kind of model state, and bytes held by all tensors."""
    task = workload(preset, microbatch=1, length=16)
    engine = _engine(task, stage, precision)
    for step in range(steps):
        _train(engine, task, step)
    assert engine.optimizer
    engine.optimizer.zero_grad()
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    return {"parameters": parameters, **asdict(engine.model_state_bytes()), "held": _held()}


def resident(preset: str, stage: int, steps: int, every: int) -> list[int]:
    """Train for `steps` and return the resident bytes of this process after every `every` of them."""
    task = workload(preset, microbatch=1, length=16)
    engine = _engine(task, stage, "fp32")
    samples: list[int] = []
    for step in range(1, steps + 1):
        _train(engine, task, step)
        if step % every == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            samples.append(pages * 4096)
    return samples


def _engine(task: Workload, stage: int, precision: str) -> shoal.Engine:
    torch.manual_seed(SEED)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(BETAS)}}, **PRECISION[precision]}
    engine, *_ = shoal.initialize(model=task.build(), config=config)
    return engine


def _train(engine: shoal.Engine, task: Workload, step: int) -> None:
    inputs, targets = task.batch(step, engine.global_rank)
    engine.backward(task.loss(engine(inputs).float(), targets))
    engine.step()


def _held() -> int:
    """Return the bytes of all storages that tensors of this process hold."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]  guards refuse
                storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()  # pyright: ignore[reportPrivateUsage]  its identity
    return sum(storages.values())
