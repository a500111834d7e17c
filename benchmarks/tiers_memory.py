"""Train a GPT with everything on disk, and say as JSON what memory it took beside the estimate. Started by tiers.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))  # glibc: what is freed leaves the process at once

import torch
from tiers import CHUNKS, DISKS, on_disk
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from workloads import _example

import shoal
from shoal.plan import estimate_working_memory
from shoal.tier import trim
from shoal.tier.store import WRITE_AHEAD

SETTLED = 50
BUFFERS = 3


def main() -> None:
    folder, way, steps, dim, layers = *sys.argv[1:3], *map(int, sys.argv[3:6])
    torch.set_num_threads(1)
    shoal.init_distributed()
    model = _example("gpt/model.py")
    x = torch.randint(256, (1, 64))
    small = model.Shape(layers=1, dim=64, heads=1).build()
    engine = shoal.initialize(model=small, config=on_disk(folder, way))[0]
    _train(engine, x, 2)  # what every process that trains holds: libraries, compiled code, thread stacks
    engine.destroy()
    del engine, small
    activations = _activations(lambda number: model.Shape(layers=number, dim=dim, heads=dim // 64).build(), layers, x)
    trim()
    base = _resident()
    given = on_disk(folder, way)
    with shoal.zero.Init(config=given):
        large = model.Shape(layers=layers, dim=dim, heads=dim // 64).build()
    engine = shoal.initialize(model=large, config=given)[0]
    assert engine.sharded is not None
    in_backward, _ = DISKS[way]
    units = [unit.layout.size for unit in engine.sharded.units]
    expected = estimate_working_memory(
        units, 3, 1, compute=torch.float32, accumulate=torch.float32, weights_offloaded=True, state_offloaded=True,
        window=BUFFERS, chunks=CHUNKS, write_ahead=WRITE_AHEAD, in_backward=in_backward)
    _clear_peak()
    _train(engine, x, SETTLED)
    settled = _resident()
    _train(engine, x, steps - SETTLED)
    sys.stdout.write(json.dumps({
        "model state": 16 * sum(units), "process before the model": base, "activations": activations,
        "working memory, estimated": expected.total, "estimate": base + activations + expected.total, "peak": _peak(),
        "after 50 steps": settled, "after all steps": _resident()}) + "\n")


def _train(engine: shoal.Engine, x: Tensor, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine(x, x))
        engine.step()


def _activations(shape: Callable[[int], nn.Module], layers: int, x: Tensor) -> int:
    """Return the bytes that autograd keeps of a forward beside weights: as plain models of one and two blocks show."""
    one, two = (_kept(shape(number), x) for number in (1, 2))
    return one + (layers - 1) * (two - one)


def _kept(model: nn.Module, x: Tensor) -> int:
    found: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x, x)
    del loss
    return sum(found.values())


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _clear_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
