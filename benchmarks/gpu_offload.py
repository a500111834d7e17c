"""One GPU and its host: the largest GPT that trains, and how fast, for each place that state may rest in.

    python benchmarks/gpu_offload.py [--sizes 1 7 13] [--ways none optimizer all ratio disk fsdp2] [--path FOLDER]

Each size (billions of parameters) and way runs in a process of its own, so that one that does not fit ends alone. bf16,
AdamW, blocks recomputed in backward. Tokens per second and TFLOP/s are of the median step; the share is that of the matmul
peak, measured in the same run. FSDP2 shards each block, with CPUOffloadPolicy. Without a CUDA device it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import Outcome, Sheet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from workloads import _example

SHAPES = {1: (24, 1792, 14), 7: (32, 4096, 32), 13: (40, 5120, 40), 20: (48, 5888, 46), 30: (56, 6656, 52),
          40: (60, 7424, 58)}
"""Blocks, width and heads by billions of parameters."""
WAYS = ("none", "optimizer", "all", "ratio", "disk", "fsdp2")
BLOCK, STEPS, WARM = 2048, 6, 2
TERA = 1e12


def main() -> None:
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_offload: needs a CUDA device; here is none")
    if options.child:
        sys.stdout.write(json.dumps(_train(*json.loads(options.child), path=options.path)) + "\n")
        return
    peak = _peak()
    rows, raw = [], {}
    for size in options.sizes:
        for way in options.ways:
            found = _run(size, way, options.path)
            raw[f"{size} {way}"] = found
            rows.append(_row(size, way, found, peak))
    columns = ("billions", "way", "parameters", "tokens/s", "TFLOP/s", "of the peak", "GPU GiB", "host GiB", "why not")
    name = torch.cuda.get_device_name()
    Outcome(benchmark="gpu-offload", command=" ".join(["python", *sys.argv]),
            note=f"{name}, bf16 matmul peak measured {peak / TERA:.0f} TFLOP/s; sequences of {BLOCK}, one at a time.",
            sheets=(Sheet(title="GPTs on one GPU", columns=columns, rows=tuple(rows)),), targets=(),
            raw=raw).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", choices=SHAPES, default=(1, 7, 13, 20),
                        help="billions of parameters")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="where state rests (all)")
    parser.add_argument("--path", default="out/benchmarks/disk", help="a folder of the disk")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/gpu-offload.json)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(size: int, way: str, path: str) -> dict[str, Any]:
    """Train one size in one way in a process of its own; what went wrong is its last line."""
    Path(path).mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"{size} billion, {way}\n")
    done = subprocess.run([sys.executable, __file__, "--path", path, "--child", json.dumps([size, way])], text=True,
                          capture_output=True, check=False)
    if done.returncode:
        return {"failure": next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "killed")[:100]}
    return json.loads(done.stdout.splitlines()[-1])


def _row(size: int, way: str, found: dict[str, Any], peak: float) -> tuple[str, ...]:
    if "failure" in found:
        return str(size), way, *["-"] * 6, found["failure"]
    rate = found["tokens"] / found["seconds"]
    return (str(size), way, f"{found['parameters']:,}", f"{rate:.0f}", f"{rate * found['flops'] / TERA:.1f}",
            f"{rate * found['flops'] / peak:.2f}", f"{found['device'] / 2**30:.1f}", f"{found['host'] / 2**30:.1f}", "")


def _peak() -> float:
    """Return the flops per second of a large bf16 matmul."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - start)


def _train(size: int, way: str, *, path: str) -> dict[str, Any]:
    layers, dim, heads = SHAPES[size]
    model_file = _example("gpt/model.py")
    shape = model_file.Shape(layers=layers, dim=dim, heads=heads)
    torch.manual_seed(0)
    build = _fsdp2 if way == "fsdp2" else _shoal
    parameters, flops, step = build(lambda: _recomputed(shape.build()), way, path)
    seconds: list[float] = []
    for number in range(WARM + STEPS):
        x = torch.randint(256, (1, BLOCK), device="cuda")
        start = time.perf_counter()
        step(x)
        torch.cuda.synchronize()
        if number >= WARM:
            seconds.append(time.perf_counter() - start)
    status = Path("/proc/self/status").read_text().splitlines()
    host = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return {"parameters": parameters, "flops": flops(BLOCK), "tokens": BLOCK, "seconds": statistics.median(seconds),
            "device": torch.cuda.max_memory_allocated(), "host": host}


Built = tuple[int, Callable[[int], float], Callable[[Tensor], None]]


def _shoal(build: Callable[[], nn.Module], way: str, path: str) -> Built:
    import shoal

    host, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": path}
    tiers = {"none": {}, "optimizer": {"offload_optimizer": host},
             "all": {"offload_optimizer": host, "offload_param": host},
             "ratio": {"offload_optimizer": {**host, "ratio": 0.7}, "offload_param": host},
             "disk": {"offload_optimizer": disk, "offload_param": disk}}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
              "zero_optimization": {"stage": 3, **tiers[way]}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    with shoal.zero.Init(config=config, dtype=torch.bfloat16):
        model = build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = shoal.initialize(model=model, config=config)

    def step(x: Tensor) -> None:
        engine.backward(engine(x, x))
        engine.step()

    return parameters, model.flops, step  # type: ignore[return-value]


def _fsdp2(build: Callable[[], nn.Module], way: str, path: str) -> Built:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1)
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy, offload_policy=CPUOffloadPolicy())  # type: ignore[arg-type]
    fully_shard(model, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(x: Tensor) -> None:
        model(x, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return parameters, model.flops, step  # type: ignore[return-value]


def _recomputed(model: nn.Module) -> nn.Module:
    """Have the blocks of a GPT computed again in backward instead of keeping their activations."""
    for block in model.blocks:  # type: ignore[union-attr]
        inner = block.forward  # type: ignore[union-attr]
        block.forward = lambda x, turns, inner=inner: checkpoint(inner, x, turns, use_reentrant=False)  # type: ignore
    return model


if __name__ == "__main__":
    main()
