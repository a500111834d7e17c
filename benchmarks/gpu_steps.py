"""Campaign 2: a training step of a GPT of 1.1 B parameters in bf16 on one GPU, and where its time goes.

    python benchmarks/gpu_steps.py [--small] [--rows matmul plain stage-0 stage-3 fsdp2 first-of-8-stage-3 ...]

Every system trains the same model with AdamW and clipping, blocks recomputed in backward, at several batches. A row has, for
each batch: ms a step, tokens a second, the share of the measured matmul peak (mfu) and of the data sheet's (of sheet), the
share of the time in which kernels ran (busy), waits of the host (for the device, and for events) and cudaMallocs a step, and
GiB reserved. `first-of-8` is rank 0 of 8 on torch's fake process group at 7 B: the memory and the host's work of a rank,
without messages. `optimizer` is the GB/s of the step alone, `packing` of signs. `attention` and `layer` are times as fast as
torch's, forward and backward: block-sparse attention at 16,384 tokens beside SDPA, due 0.6 of what the density of its layout
allows, and an encoder layer beside `nn.TransformerEncoderLayer`.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_campaign import Measured, Row, Scale, campaign, tell
from gpu_facts import GIGA, TERA, event_waits, matmul, matmul_rate, seconds_of, synchronize
from gpu_offload import _recomputed  # pyright: ignore[reportPrivateUsage]  the same model
from torch import Tensor, nn
from workloads import _example  # pyright: ignore[reportPrivateUsage]

SHAPES = {"tiny": (2, 64, 2), "1.1b": (22, 2048, 16), "7b": (32, 4096, 32)}
"""Blocks, width and heads."""
BLOCK, STEPS, WARM = 2048, 5, 2
BATCHES = (1, 4, 8)
CLIPPING = 1.0
SHEET = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Dense bf16 flops per second of NVIDIA's data sheets, by the name that torch gives the device: the SXM modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to train: a step on bytes (batch, length), and the flops of a token."""

    step: Callable[[Tensor], None]
    flops: float
    parameters: int


def build(scale: Scale, size: str) -> tuple[Any, int]:
    """Return a model on the CPU's or the GPU's memory, in fp32, and its length of sequences."""
    layers, dim, heads = SHAPES["tiny" if scale.small else size]
    model = _example("gpt/model.py").Shape(layers=layers, dim=dim, heads=heads).build()
    return _recomputed(model), 16 if scale.small else BLOCK


def _plain(scale: Scale, size: str) -> System:
    """bf16 weights with fp32 masters, as Shoal keeps them."""
    with scale.device:
        model, length = build(scale, size)
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)

    def step(x: Tensor) -> None:
        model(x, x).backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIPPING)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)  # pyright: ignore[reportPrivateImportUsage,reportPrivateUsage]

    return System(step=step, flops=model.flops(length), parameters=sum(master.numel() for master in masters))


def _shoal(scale: Scale, size: str, stage: int, more: dict[str, Any] | None = None) -> System:
    import shoal

    bf16 = {"enabled": True, "check_grad_overflow": False}  # the plain loop and FSDP2 check nothing either
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": bf16, "gradient_clipping": CLIPPING,
              "log_level": "error", "zero_optimization": {"stage": stage, **(more or {})},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 1e-2}}}
    shoal.init_distributed(verbose=False)
    sharded = shoal.zero.Init(config=config, dtype=torch.bfloat16, enabled=stage == 3)
    with scale.device, sharded:
        model, length = build(scale, size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = shoal.initialize(model=model, config=config)[0]

    def step(x: Tensor) -> None:
        engine.backward(engine(x, x))
        engine.step()

    return System(step=step, flops=model.flops(length), parameters=parameters)


def _fsdp2(scale: Scale, size: str) -> System:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        backend = "gloo" if scale.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    with torch.device("meta"):
        model, length = build(scale, size)
    mesh = init_device_mesh(scale.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, mesh=mesh)
    fully_shard(model, mp_policy=policy, mesh=mesh)
    model.to_empty(device=scale.device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(x: Tensor) -> None:
        model(x, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()

    return System(step=step, flops=model.flops(length), parameters=sum(p.numel() for p in model.parameters()))


def _fake() -> None:
    """Be rank 0 of 8 whose collectives move nothing: it has its own values in place of the others'."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())


def measured(scale: Scale, system: System, batches: Sequence[int] = BATCHES, steps: int = STEPS, *, warm: int = WARM,
             looks: bool = True) -> Measured:
    """Time `steps` steps of `system` after `warm` others at each of `batches`, as far as memory holds them.

    With `looks` two more steps tell how long kernels ran, and how often the host waited.
    """
    length, peak = (16 if scale.small else BLOCK), matmul_rate(scale)
    found: Measured = {"parameters": system.parameters}
    for batch in (1,) if scale.small else batches:
        x = torch.randint(256, (batch, length), device=scale.device)
        try:
            start = time.perf_counter()
            for _ in range(warm):
                system.step(x)
            synchronize(scale.device)
            tell({**found, f"warm s x{batch}": time.perf_counter() - start})  # where the timed steps get no time
            found |= {f"{name} x{batch}": value for name, value in _steps(scale, system, x, peak, steps, looks).items()}
        except torch.OutOfMemoryError:
            return {**found, f"x{batch}": "out of memory"}
        tell(found)
    return found


def _steps(scale: Scale, system: System, x: Tensor, peak: float, steps: int, looks: bool) -> Measured:
    mallocs, seconds = _mallocs(scale), list[float]()
    for _ in range(steps):
        start = time.perf_counter()
        system.step(x)
        synchronize(scale.device)
        seconds.append(time.perf_counter() - start)
    mallocs = _mallocs(scale) - mallocs
    median = statistics.median(seconds)
    flops = system.flops * x.numel() / median
    found: Measured = {"ms": 1e3 * median, "tokens/s": x.numel() / median, "mfu": flops / peak, **_of_sheet(scale, flops),
                       "mallocs": mallocs / steps}
    if scale.device.type == "cuda":
        found |= {"busy": _busy(system, x), "waits": _waits(system, x)} if looks else {}
        found |= {"GiB": torch.cuda.max_memory_reserved() / 2**30}
    return found


def _of_sheet(scale: Scale, flops: float) -> Measured:
    """Return the share of the data sheet's peak that `flops` per second are; nothing where no sheet is known."""
    name = torch.cuda.get_device_name() if scale.device.type == "cuda" else str(scale.device)
    return {"of sheet": flops / SHEET[name]} if name in SHEET else {}


def _mallocs(scale: Scale) -> int:
    return torch.cuda.memory_stats().get("num_device_alloc", 0) if scale.device.type == "cuda" else 0


def _busy(system: System, x: Tensor) -> float:
    """Return the share of a step's time in which at least one kernel ran."""
    from torch.autograd.profiler_util import DeviceType  # pyright: ignore[reportPrivateImportUsage]
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        system.step(x)
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
    spans = sorted((event.time_range.start, event.time_range.end) for event in profiler.events() or ()
                   if event.device_type == DeviceType.CUDA)
    busy, until = 0.0, float("-inf")
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e6 / elapsed


def _waits(system: System, x: Tensor) -> int:
    """Return how often the host waits for the device in a step: for streams and blocking copies, and for events."""
    if x.is_cuda:
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught, event_waits() as events:
            warnings.simplefilter("always")
            system.step(x)
    finally:
        if x.is_cuda:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught) + len(events)


def _row(make: Callable[[Scale], System]) -> Row:
    return Row(run=lambda scale: measured(scale, make(scale)), seconds=65)


def _first_of_8(make: Callable[[Scale], System]) -> Row:
    def run(scale: Scale) -> Measured:
        _fake()
        return measured(scale, make(scale))
    return Row(run=run, seconds=75)


def optimizer(scale: Scale) -> Measured:
    """Return the rate of torch's fused step with a cast of gradients and one of weights: 48 bytes an element."""
    elements = 1 << (16 if scale.small else 27)
    master = nn.Parameter(torch.randn(elements, device=scale.device))
    gradient, weight = (torch.empty(elements, dtype=torch.bfloat16, device=scale.device).zero_() for _ in range(2))
    fused = torch.optim.AdamW([master], lr=1e-5, fused=True)

    def step() -> None:
        master.grad = gradient.float()
        fused.step()
        weight.copy_(master.detach())

    return {"GB/s": 48 * elements / GIGA / seconds_of(step, scale.device), "peak TFLOP/s": matmul_rate(scale) / TERA}


def packing(scale: Scale) -> Measured:
    """Return the rates at which fp32 elements are packed to signs, with their residual, and unpacked."""
    from shoal.onebit import pack, packed_bytes, unpack

    elements = 1 << (16 if scale.small else 28)
    values = torch.randn(elements, device=scale.device)
    packed = torch.empty(packed_bytes(elements), dtype=torch.uint8, device=scale.device)
    ways = {"pack": lambda: pack(values, packed), "unpack": lambda: unpack(packed, values)}
    return {f"{name}, billions/s": elements / GIGA / seconds_of(way, scale.device) for name, way in ways.items()}


def attention(scale: Scale) -> Measured:
    """Return how many times as fast as SDPA block-sparse attention is, forward and backward, in blocks of 64."""
    from torch.nn.functional import scaled_dot_product_attention

    from attention import operands, window
    from shoal.attention import Blocks, attend

    length = 1024 if scale.small else 16384
    blocks = Blocks.of(window(length // 64), 64)
    found: Measured = {"tokens": length, "due": 0.6 / blocks.density}
    for dtype in (torch.bfloat16, torch.float16):
        *leaves, gradient = (each.detach().to(scale.device, dtype) for each in operands(length))
        leaves = [leaf.requires_grad_() for leaf in leaves]

        def both(way: Callable[..., Tensor], leaves: list[Tensor] = leaves, gradient: Tensor = gradient) -> float:
            return seconds_of(lambda: torch.autograd.grad(way(*leaves), leaves, gradient), scale.device)

        dense, sparse = both(scaled_dot_product_attention), both(partial(attend, blocks=blocks))
        kind = str(dtype).removeprefix("torch.")
        found |= {f"{kind} SDPA ms": 1e3 * dense, f"{kind} ms": 1e3 * sparse, f"{kind} times": dense / sparse}
        tell(found)
    return found


def layer(scale: Scale) -> Measured:
    """Return how many times as fast as torch's encoder layer `TransformerLayer` is in bf16, forward and backward."""
    from shoal.nn import TransformerConfig, TransformerLayer

    hidden, heads, batch, length = (64, 4, 1, 32) if scale.small else (1024, 16, 16, 512)
    found: Measured = {}
    for dropout in (0.0, 0.1):
        with scale.device:
            torchs = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, dropout, "gelu", batch_first=True)
            mine = TransformerLayer(TransformerConfig(
                hidden_size=hidden, heads=heads, num_hidden_layers=12, attn_dropout_ratio=dropout,
                hidden_dropout_ratio=dropout, pre_layer_norm=False, normalize_invertible=True, gelu_checkpoint=True))
        x = torch.randn(batch, length, hidden, device=scale.device, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn_like(x)

        def both(module: nn.Module, x: Tensor = x, gradient: Tensor = gradient) -> float:
            of = [x, *module.to(torch.bfloat16).parameters()]
            return seconds_of(lambda: torch.autograd.grad(module(x), of, gradient), scale.device)

        dense, own = both(torchs), both(mine)
        found |= {f"torch ms, dropout {dropout:g}": 1e3 * dense, f"ms, dropout {dropout:g}": 1e3 * own,
                  f"times, dropout {dropout:g}": dense / own}
        tell(found)
    return found


ROWS = {
    "matmul": Row(run=matmul, seconds=20), "optimizer": Row(run=optimizer, seconds=20),
    "plain": _row(lambda scale: _plain(scale, "1.1b")),
    "stage-0": _row(lambda scale: _shoal(scale, "1.1b", 0)),
    "stage-3": _row(lambda scale: _shoal(scale, "1.1b", 3)),
    "fsdp2": _row(lambda scale: _fsdp2(scale, "1.1b")),
    "first-of-8-stage-3": _first_of_8(lambda scale: _shoal(scale, "7b", 3)),
    "first-of-8-fsdp2": _first_of_8(lambda scale: _fsdp2(scale, "7b")),
    "attention": Row(run=attention, seconds=45), "layer": Row(run=layer, seconds=40),
    "packing": Row(run=packing, seconds=25),
}

if __name__ == "__main__":
    campaign("gpu-steps", __file__, __doc__ or "", ROWS)
