"""Campaign 3: state on the host and on disk, on one GPU: 7 B on the host, 2 B on disk, a save and a load.

    python benchmarks/gpu_states.py [--small] [--rows host-optimizer host-all ratio fsdp2-host disk save]

ms a step, tokens a second, the share of the matmul peak, GiB reserved on the GPU and held by the process, beside FSDP2's
CPUOffloadPolicy. `ratio` tries models of fixed sizes. `save` saves 1.1 B, and loads it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_campaign import Measured, Row, Scale, campaign
from gpu_steps import SHAPES, System, _shoal, build, measured  # pyright: ignore[reportPrivateUsage]  the same systems
from machine import available
from torch import Tensor, nn

HOST: dict[str, Any] = {"device": "cpu"}
LARGER = {"2b": (24, 2560, 20), "13b": (40, 5120, 40), "20b": (48, 5888, 46), "30b": (56, 6656, 52)}
SHAPES.update(LARGER)
FEW = (1, 8)
"""Batches of a row whose steps take seconds."""


def _host_gib() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20


def _row(size: str, *, on_host: float, **tiers: Any) -> Row:
    """Return a row of a model of whose 16 bytes a parameter `on_host` rest on the host."""
    def run(scale: Scale) -> Measured:
        layers, dim, _ = SHAPES[size]
        needed = 12 * layers * dim**2 * 16 * on_host
        if not scale.small and needed > 0.95 * available():
            return {"failure": f"needs {needed / 1e9:.0f} GB on the host, which has {available() / 1e9:.0f}"}
        return {**measured(scale, _shoal(scale, size, 3, tiers), FEW, 2), "host GiB": _host_gib()}
    return Row(run=run, seconds=240)


def disk(scale: Scale) -> Measured:
    """Return steps with all state on disk."""
    where = {"device": "nvme", "nvme_path": scale.path}
    return {**measured(scale, _shoal(scale, "2b", 3, {"offload_optimizer": where, "offload_param": where}), FEW, 2),
            "host GiB": _host_gib()}


def fsdp2(scale: Scale) -> Measured:
    """Return steps of FSDP2 with CPUOffloadPolicy."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    backend = "gloo" if scale.device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mesh, policy = init_device_mesh(scale.device.type, (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, length = build(scale, "7b")
    offload: dict[str, Any] = {} if scale.device.type == "cpu" else {"offload_policy": CPUOffloadPolicy()}
    for block in [*model.blocks, model]:
        fully_shard(block, mp_policy=policy, mesh=mesh, **offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(x: Tensor) -> None:
        model(x, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    system = System(step=step, flops=model.flops(length), parameters=sum(p.numel() for p in model.parameters()))
    return {**measured(scale, system, FEW, 2), "host GiB": _host_gib()}


def save(scale: Scale) -> Measured:
    """Return the time that a save holds up training, that of the whole save, and that of a load."""
    import shoal

    model, _ = build(scale, "1.1b")
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "log_level": "error",
              "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    engine = shoal.initialize(model=model, config=config)[0]
    x = torch.randint(256, (1, 16), device=engine.device)
    engine.backward(engine(x, x))
    engine.step()
    with tempfile.TemporaryDirectory(dir=scale.path) as folder:
        start = time.perf_counter()
        engine.save_checkpoint(folder)
        held_up = time.perf_counter() - start
        engine.wait_for_checkpoint()
        saved = time.perf_counter() - start
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        start = time.perf_counter()
        engine.load_checkpoint(folder)
        loaded = time.perf_counter() - start
    return {"GB": size / 1e9, "held up s": held_up, "saved s": saved, "loaded s": loaded}


ROWS = {
    "host-optimizer": _row("7b", on_host=14 / 16, offload_optimizer=HOST),
    "host-all": _row("7b", on_host=1, offload_optimizer=HOST, offload_param=HOST),
    "fsdp2-host": Row(run=fsdp2, seconds=240),
    "disk": Row(run=disk, seconds=170),
    "save": Row(run=save, seconds=200),
    **{f"ratio-{size}": _row(size, on_host=0.85, offload_optimizer={**HOST, "ratio": 0.8}, offload_param=HOST)
       for size in ("7b", "13b")},
}

if __name__ == "__main__":
    campaign("gpu-states", __file__, __doc__ or "", ROWS)
