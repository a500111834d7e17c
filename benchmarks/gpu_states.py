"""Campaign 3: state on the host and on disk, on one GPU: 7 B on the host, the largest model, a save and a load, 2 B on disk.

    python benchmarks/gpu_states.py [--small] [--rows host-all fsdp2-host largest save host-optimizer disk]

ms a step, tokens a second, the shares of the measured matmul peak (mfu) and of the data sheet's (of sheet), GiB reserved on
the GPU and held by the process, beside FSDP2's CPUOffloadPolicy. `save` saves 1.1 B, and loads it. Every row takes a few
steps, at one batch, `largest` at two; the profiler's are campaign 2's.

`largest` is a GPT of width 5120 with as many blocks as the GPU and the host hold together at 16 bytes a parameter: `ratio`
fills both. Its share is that of all their bytes, the host's being the container's. A disk would hold more, but a step would
read and write all of it: minutes.

Estimated seconds on a machine with 16 cores, 128 GiB and copies of 25 to 50 GB/s, with a start of 15 s each: page-locking at
3 to 6 GB/s, steps on the host at 60 to 120 GB/s, a disk at 1 to 2 GB/s. `disk` has what the others leave.

    row              state, its pages locked   steps           together   share
    host-all         30 to 55 s                3 of 6 to 8 s   65 to 95   100
    fsdp2-host       20 to 35 s                3 of 10 to 20   65 to 110  115
    largest (H200)   45 to 80 s                4 of 8 to 14    90 to 150  155
    save             5 to 10 s                 20 to 35 s      40 to 60    60
    host-optimizer   25 to 35 s                2 of 4 to 7     45 to 65    65
    disk             15 to 30 s                2 of 30 to 60   90 to 165   what is left: 75 at least
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_campaign import Measured, Row, Scale, campaign, tell
from gpu_steps import BLOCK, SHAPES, System, _shoal, build, measured  # pyright: ignore[reportPrivateUsage]  the same systems
from machine import available, memory
from torch import Tensor, nn

HOST: dict[str, Any] = {"device": "cpu"}
LARGER = {"2b": (24, 2560, 20)}
SHAPES.update(LARGER)
FEW = (8,)
"""Batches of a row whose steps take seconds."""
RISING = (1, 8)
"""Of a model that may not fit: the first reports before the second can run out of memory."""

WIDTH, HEADS = 5120, 40
"""Of the largest model."""
STATE, OFF = 14, 2
"""Bytes a parameter of master, moments and 16-bit gradient, where `ratio` says, and of the weight, on the host."""
WORKING = 20e9
"""Bytes of the GPU that state leaves free; `working` of the largest model of an H200 is 17e9."""
FULL = 0.95
"""Of what is free, the share that state may take."""


def _host_gib() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20


def _row(size: str, *, on_host: float, seconds: float, steps: int, **tiers: Any) -> Row:
    """Return a row of a model of whose 16 bytes a parameter `on_host` rest on the host, with `steps` timed steps."""
    def run(scale: Scale) -> Measured:
        layers, dim, _ = SHAPES[size]
        needed = 12 * layers * dim**2 * 16 * on_host
        if not scale.small and needed > 0.95 * available():
            return {"failure": f"needs {needed / 1e9:.0f} GB on the host, which has {available() / 1e9:.0f}"}
        return {**measured(scale, _shoal(scale, size, 3, tiers), FEW, steps, warm=1, looks=False), "host GiB": _host_gib()}
    return Row(run=run, seconds=seconds)


def working(blocks: int, batch: int) -> float:
    """Return the estimated bytes that a step of the largest model takes on the GPU beside its state.

    Saved are the inputs of each block, which is computed again in backward with some 34 bytes an element; three blocks are
    gathered, and three gradients on their way, at 2 bytes a parameter; 2e9 are the CUDA context's, cuBLAS's and lost.
    """
    elements = batch * BLOCK * WIDTH
    return 2 * elements * blocks + 34 * elements + 2 * 6 * 12 * WIDTH**2 + 2e9


def fill(gpu: float, host: float) -> tuple[int, float]:
    """Return the blocks of the largest model that `gpu` and `host` free bytes hold, and its ratio of state on the host."""
    gpu, host = max(0.0, FULL * (gpu - WORKING)), FULL * host
    block = 12 * WIDTH**2
    blocks = int(min((gpu + host) / (STATE + OFF), host / OFF) / block)  # the host has all weights
    ratio = (host / (blocks * block) - OFF) / STATE if blocks else 1.0
    return blocks, min(1.0, max(0.0, ratio))


def largest(scale: Scale) -> Measured:
    """Return a step of the largest model, and the share of all bytes of the GPU and the host that its 16 a parameter are."""
    gpu, whole = torch.cuda.mem_get_info() if scale.device.type == "cuda" else (0, 0)
    blocks, ratio = fill(gpu, available())
    SHAPES["largest"] = (blocks, WIDTH, HEADS)
    tiers = {"offload_optimizer": {**HOST, "ratio": ratio}, "offload_param": HOST}
    system = _shoal(scale, "largest", 3, tiers)
    share = 16 * system.parameters / (whole + memory())
    tell(shown := {"blocks": blocks, "ratio": ratio, "parameters": system.parameters, "of all bytes": share})
    return {**shown, **measured(scale, system, RISING, 1, warm=1, looks=False), "host GiB": _host_gib()}


def disk(scale: Scale) -> Measured:
    """Return steps with all state on disk."""
    where = {"device": "nvme", "nvme_path": scale.path}
    return {**measured(scale, _shoal(scale, "2b", 3, {"offload_optimizer": where, "offload_param": where}), FEW, 1, warm=1,
                       looks=False), "host GiB": _host_gib()}


def fsdp2(scale: Scale) -> Measured:
    """Return steps of FSDP2 with CPUOffloadPolicy."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        backend = "gloo" if scale.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mesh, policy = init_device_mesh(scale.device.type, (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with torch.device("meta"):
        model, length = build(scale, "7b")
    offload: dict[str, Any] = {} if scale.device.type == "cpu" else {"offload_policy": CPUOffloadPolicy()}
    for block in [*model.blocks, model]:
        fully_shard(block, mp_policy=policy, mesh=mesh, **offload)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)  # to draw 6 billion numbers on the host would take a minute
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(x: Tensor) -> None:
        model(x, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    system = System(step=step, flops=model.flops(length), parameters=sum(p.numel() for p in model.parameters()))
    return {**measured(scale, system, FEW, 2, warm=1, looks=False), "host GiB": _host_gib()}


def save(scale: Scale) -> Measured:
    """Return the time that a save holds up training, that of the whole save, and that of a load."""
    import shoal

    with scale.device:  # where drawing a billion numbers takes no time
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
    "host-all": _row("7b", on_host=1, seconds=100, steps=2, offload_optimizer=HOST, offload_param=HOST),
    "fsdp2-host": Row(run=fsdp2, seconds=115),
    "largest": Row(run=largest, seconds=155),
    "save": Row(run=save, seconds=60),
    "host-optimizer": _row("7b", on_host=14 / 16, seconds=65, steps=1, offload_optimizer=HOST),
    "disk": Row(run=disk, seconds=75),
}
"""The figures that are due come first; the last row has the time that the others leave."""

if __name__ == "__main__":
    campaign("gpu-states", __file__, __doc__ or "", ROWS)
