"""One rank of benchmarks/memory.py: it trains a few steps and reports the memory that it holds."""

from __future__ import annotations

import ctypes
import gc
import mmap
from dataclasses import asdict
from pathlib import Path

import torch
from systems import ADAMW, BETAS
from torch import Tensor
from workloads import SEED, Workload, workload

import shoal
from shoal.tier import trim

PAGE = mmap.PAGESIZE
PRECISION: dict[str, dict[str, object]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1}},
}


def state(preset: str, stage: int, precision: str, steps: int) -> dict[str, int]:
    """Train for `steps` and return parameters, bytes of each kind of model state, bytes held by all tensors, and what the
    process grew by: the heap in use (glibc's mallinfo2, with its mappings), and resident memory.

    Growth is from a process that has trained another, tiny model of that kind, so that libraries count nothing.
    """
    small = workload("tiny", microbatch=1, length=16)
    engine = _engine(small, stage, precision)
    for step in range(steps):
        _train(engine, small, step)
    engine.destroy()
    del engine
    gc.collect()
    trim()
    before = _process()
    task = workload(preset, microbatch=1, length=16)
    engine = _engine(task, stage, precision)
    for step in range(steps):
        _train(engine, task, step)
    assert engine.optimizer
    engine.optimizer.zero_grad()
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    held, largest = _held(), max(4 * unit.layout.size for unit in engine.sharded.units) if engine.sharded else 0
    trim()
    after = _process()
    return {"parameters": parameters, **asdict(engine.model_state_bytes()), "held": held, "largest": largest,
            **{name: after[name] - before[name] for name in after}}


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


def _process() -> dict[str, int]:
    """Return the bytes that the allocator has given out, and those that are resident."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallocInfo
    info = library.mallinfo2()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"allocated": info.uordblks + info.hblkhd, "resident": pages * PAGE}


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later: `uordblks` bytes in use, `hblkhd` bytes of mappings."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                                                     "uordblks", "fordblks", "keepcost")]


def _held() -> int:
    """Return the bytes in memory of all storages that tensors of this process hold.

    Pages that a storage has an address for but that are not in memory, never written or returned to the system, count
    nothing.
    """
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]  guards refuse
                storage = thing.untyped_storage()
            storages[storage._cdata] = _in_memory(storage.data_ptr(), storage.nbytes())  # pyright: ignore[reportPrivateUsage]
    return sum(storages.values())


def _in_memory(address: int, size: int) -> int:
    """Return the number of the `size` bytes that are in memory, by mincore(2); all of a buffer that has no whole page."""
    first, last = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    if last <= first:
        return size
    found = (ctypes.c_ubyte * ((last - first) // PAGE))()
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(first), ctypes.c_size_t(last - first), found):
        raise OSError(ctypes.get_errno(), "mincore")
    return size - PAGE * sum(1 for page in found if not page & 1)
