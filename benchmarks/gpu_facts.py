"""Campaign 1: whether training on the GPU is right, then the speeds of the machine.

    python benchmarks/gpu_facts.py [--small] [--rows stages races delays tests-one_gpu ... copies pages matmul disk ...]

    stages    steps of each stage and tier beside a plain loop; none may wait for the device (`set_sync_debug_mode("error")`,
              and no wait for an event, which that does not see)
    races     the same under torch's sanitizer of streams (`TORCH_CUDA_SANITIZER=1`)
    delays    the same with random sleeps on every stream
    tests-..  a file of tests/gpu
    ranks     a share of the suites of several ranks, beside plain PyTorch; on one GPU ranks share it
    copies    GB/s between host and device, from pinned and from other memory
    pages     GB/s of page-locking
    matmul    TFLOP/s of bf16
    cpu-step  GB/s of the native AdamW step
    disk      GB/s of a file in --path
    tests-attention, tests-flex    last: flex_attention compiles for some ten seconds a case, so `flex` is each fifth of them

Rows of tests tell the counts and the names of failures after each test. A test has a minute, and ten failures end a row.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_campaign import Measured, Row, Scale, campaign, tell
from torch import Tensor, nn

GIGA, TERA = 1e9, 1e12
STEPS, WARM = 4, 2
ROOT = Path(__file__).parents[1]


def seconds_of(call: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Return the median time of `call` and of what it gave the device."""
    found: list[float] = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def copies(scale: Scale) -> Measured:
    from shoal.device import can_pin
    from shoal.tier.pages import pinned_zeros

    size = 1 << (20 if scale.small else 29)
    there, other = torch.zeros(size, dtype=torch.uint8, device=scale.device), torch.zeros(size, dtype=torch.uint8)
    pinned = pinned_zeros(size, torch.uint8, scale.device) if can_pin(scale.device) else other
    pairs = {"up, pinned": (there, pinned), "down, pinned": (pinned, there), "up": (there, other), "down": (other, there),
             "device": (there, there.clone())}
    return {f"{name} GB/s": size / GIGA / seconds_of(lambda to=to, of=of: to.copy_(of, non_blocking=True), scale.device)
            for name, (to, of) in pairs.items()}


def pages(scale: Scale) -> Measured:
    from shoal.device import registers_pages
    from shoal.tier.pages import pinned_zeros, zeros

    size = 1 << (22 if scale.small else 33)
    locked = registers_pages(scale.device)
    start = time.perf_counter()
    memory = pinned_zeros(size, torch.uint8, scale.device) if locked else zeros(size, torch.uint8, torch.device("cpu"))
    locking = time.perf_counter() - start
    start = time.perf_counter()
    del memory
    return {"locked": locked, "GB/s": size / GIGA / locking, "unlock GB/s": size / GIGA / (time.perf_counter() - start)}


def matmul(scale: Scale) -> Measured:
    return {"TFLOP/s": matmul_rate(scale) / TERA}


def matmul_rate(scale: Scale) -> float:
    """Return the flops per second of a large bf16 matmul."""
    size = 64 if scale.small else 8192
    a, b = (torch.randn(size, size, device=scale.device, dtype=torch.bfloat16) for _ in range(2))
    repeats = 2 if scale.small else 20

    def products() -> None:
        for _ in range(repeats):
            torch.mm(a, b)

    return repeats * 2 * size**3 / seconds_of(products, scale.device)


def cpu_step(scale: Scale) -> Measured:
    from optimizer import _native  # pyright: ignore[reportPrivateUsage]  the same step, on this machine

    elements = 1 << (16 if scale.small else 28)
    step = _native(elements, torch.bfloat16)
    return {"threads": torch.get_num_threads(), "GB/s": 28 * elements / GIGA / seconds_of(step, torch.device("cpu"), 3)}


def disk(scale: Scale) -> Measured:
    from shoal.tier.bench import SMALLEST, Setting, measure, merged

    setting = Setting(block_bytes=1 << 20, requests=16)
    size = SMALLEST if scale.small else 8 << 30
    rows = merged(list(measure(scale.path, [setting], bytes=size, seconds=1 if scale.small else 10)))
    return {"read GB/s": rows[0].read / GIGA, "write GB/s": rows[0].write / GIGA}


# Steps beside a plain loop

_HOST = {"device": "cpu"}


def _ways(path: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return stages and tiers by name."""
    disk = {"device": "nvme", "nvme_path": path}
    return {**{f"stage {stage}": (stage, {}) for stage in range(4)},
            "optimizer on the host": (2, {"offload_optimizer": _HOST}),
            "all on the host": (3, {"offload_optimizer": _HOST, "offload_param": _HOST}),
            "all on disk": (3, {"offload_optimizer": disk, "offload_param": disk})}


def _model(width: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(4)]
    return nn.Sequential(nn.Linear(width, width), *blocks)


def _inputs(width: int, device: torch.device) -> list[Tensor]:
    return [torch.randn(8, width, generator=torch.Generator().manual_seed(step)).to(device) for step in range(STEPS)]


def _plain(width: int, device: torch.device) -> list[Tensor]:
    model = _model(width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in _inputs(width, device):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@contextmanager
def event_waits() -> Generator[list[str]]:
    """List the places in which the host waits for an event of the device, of which `set_sync_debug_mode` says nothing."""
    from shoal.device import DeviceEvent

    found, wait = list[str](), DeviceEvent.synchronize

    def counted(event: DeviceEvent) -> None:
        caller = traceback.extract_stack(limit=2)[0]
        found.append(f"{Path(caller.filename).name}:{caller.lineno}")
        wait(event)

    with patch.object(DeviceEvent, "synchronize", counted):
        yield found


@contextmanager
def _without_waits(device: torch.device, *, forbidden: bool) -> Generator[None]:
    """Have a wait of the host for the device raise, if `forbidden`."""
    if not forbidden:
        yield
        return
    with event_waits() as waits:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    if waits:
        raise RuntimeError(f"the host waited for events of the device in a step: {', '.join(waits)}")


def _train(stage: int, tiers: dict[str, Any], width: int) -> list[Tensor]:
    import shoal

    model = _model(width)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.1, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **tiers}}
    engine = shoal.initialize(model=model, config=config)[0]
    for step, x in enumerate(_inputs(width, engine.device)):
        with _without_waits(engine.device, forbidden=step >= WARM and not tiers):  # the host steps what rests there
            engine.backward(engine(x).square().mean())
            engine.step()
    with shoal.gathered(model):
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    engine.destroy()
    return weights


def stages(scale: Scale) -> Measured:
    """Return the largest difference to a plain loop of each stage and tier, in units of the learning rate."""
    width = 64 if scale.small else 1024
    expected, found = _plain(width, scale.device), dict[str, Any]()
    for name, (stage, tiers) in _ways(scale.path).items():
        pairs = zip(_train(stage, tiers, width), expected, strict=True)
        found[name] = max((mine - theirs).abs().max().item() for mine, theirs in pairs) / 1e-3
        if not found[name] < 0.2:
            raise SystemExit(f"{name}: weights differ from a plain loop by {found[name]:.3g} learning rates")
    return found


def delays(scale: Scale) -> Measured:
    """Return `stages` where every switch to a stream may first put it to sleep for up to 2 ms."""
    from shoal.device import DeviceStream

    draw, use = random.Random(0), DeviceStream.use

    @contextmanager
    def late(stream: DeviceStream) -> Generator[None]:
        if draw.random() < 0.5:
            torch.cuda._sleep(draw.randrange(4_000_000))  # pyright: ignore[reportPrivateUsage]  of the compute stream
        with use(stream):
            if draw.random() < 0.5:
                torch.cuda._sleep(draw.randrange(4_000_000))  # pyright: ignore[reportPrivateUsage]
            yield

    if scale.device.type == "cuda":
        DeviceStream.use = late  # type: ignore[method-assign]
    return stages(scale)


_RESULT = re.compile(r"^(\S*?::.*?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
_REASON = re.compile(r"^(?:FAILED|ERROR) (.*)$")
_PYTEST = ("-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "-v", "--tb=short", "--timeout=60", "--maxfail=10",
           "-W", "default")  # a GPU has warnings of its own, each of which the house's settings would make a failure


def _tests(*arguments: str, environment: Mapping[str, str] | None = None) -> Measured:
    """Run pytest, and tell the counts of results and the failures after each test; return them with pytest's reasons."""
    counts, failures, reasons, lines = Counter[str](), list[str](), list[str](), list[str]()
    with subprocess.Popen([sys.executable, "-m", "pytest", *_PYTEST, *arguments], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if result := _RESULT.match(line):
                name, outcome = result.groups()
                counts[outcome.lower()] += 1
                failures += [name] if outcome in ("FAILED", "ERROR") else []
                tell(_results(counts, failures))
            elif reason := _REASON.match(line):
                reasons.append(reason[1])
    code = process.returncode
    if code not in (0, 1):  # 1: a test failed; others: pytest itself did
        tell({**_results(counts, failures), "output": lines[-100:]})
        why = [line for line in lines if line.startswith("E ")] or lines[-1:]
        raise RuntimeError(f"pytest ended with {code}: {why[:1]}")
    return {**_results(counts, reasons or failures), **({"output": lines[-200:]} if failures else {})}


def _results(counts: Mapping[str, int], failures: list[str]) -> Measured:
    return {**counts, **({"first": failures[0]} if failures else {}), "all": failures}


def _ranks(scale: Scale) -> Measured:
    """Return the results of each 24th test of several ranks; they share the GPU where there is one."""
    shared = {"SHOAL_TEST_DEVICE": "cuda"} if scale.device.type == "cuda" else {}
    return _tests("tests/zero/test_parity.py", "tests/pipeline", "tests/tensor_parallel",
                  environment={"SHOAL_TEST_SHARE": "240" if scale.small else "24", "SHOAL_TEST_TIMEOUT": "50", **shared})


def _file(name: str, seconds: float) -> Row:
    return Row(run=lambda scale: _tests(f"tests/gpu/test_{name}.py"), seconds=seconds)


_ATTENTION = "tests/gpu/test_attention.py"

ROWS = {
    "stages": Row(run=stages, seconds=70), "races": Row(run=stages, seconds=60, environment={"TORCH_CUDA_SANITIZER": "1"}),
    "delays": Row(run=delays, seconds=35),
    "tests-one_gpu": _file("one_gpu", 35), "tests-offload": _file("offload", 45), "ranks": Row(run=_ranks, seconds=95),
    "tests-streams": _file("streams", 20), "tests-channel": _file("channel", 20), "tests-onebit": _file("onebit", 25),
    "tests-recording": _file("recording", 15),
    "copies": Row(run=copies, seconds=12), "pages": Row(run=pages, seconds=15), "matmul": Row(run=matmul, seconds=12),
    "cpu-step": Row(run=cpu_step, seconds=15), "disk": Row(run=disk, seconds=30),
    "tests-attention": Row(run=lambda scale: _tests(_ATTENTION, "-k", "not flex"), seconds=35),
    "tests-flex": Row(run=lambda scale: _tests(_ATTENTION, "-k", "flex", environment={"SHOAL_TEST_SHARE": "5"}), seconds=30),
}
"""In the order of what is due: the last rows have what the others leave."""

if __name__ == "__main__":
    campaign("gpu-facts", __file__, __doc__ or "", ROWS)
