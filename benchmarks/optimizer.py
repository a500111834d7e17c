"""The native optimizer step beside torch's and DeepSpeed's: time, and bytes per second against plain arithmetic on arrays.

    python benchmarks/optimizer.py [--elements 30000000] [--rounds 15] [--threads 1]

AdamW in fp32, and with bf16 gradients and weights around fp32 masters, where torch casts the gradient into a buffer that it
keeps, steps, and copies the rounded weight, and so it is with DeepSpeedCPUAdam. Ways take turns in rotating order; a row is
the median of the rounds. The bytes of a row are those that must move. DeepSpeedCPUAdam takes its turns in processes of
`.venv-peers` (make peers), which build its op at first: some minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import PEERS, peer_environment
from progress import progress
from results import Outcome, Sheet, Target
from torch import Tensor

from shoal.native.step import Rule, step

CONSTANTS = [0.1, 0.95, 0.05, 1e-3, 1.0, 1e-8, 1e-4]
GIGA = 1e9


CHILD = Path(__file__).with_name("cpu_adam.py")
PEERS_OF = {"float32": "DeepSpeedCPUAdam, fp32", "bfloat16": "DeepSpeedCPUAdam, bf16"}
"""By the dtype of its gradients and weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Something that takes turns: `turn` returns its seconds, and `bytes` an element must move."""

    turn: Callable[[], float]
    bytes: int


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    ways, skipped = _ways(options.elements), ""
    with progress() as tell, ExitStack() as stack:
        for dtype, name in PEERS_OF.items():
            peer = stack.enter_context(_peer(options.elements, options.threads, dtype, tell))
            if isinstance(peer, Way):
                ways[name] = peer
            else:
                skipped += f" {name}: {peer}."
        seconds = _turns(ways, options.rounds, tell)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    rates = {name: ways[name].bytes * options.elements / medians[name] / GIGA for name in ways}
    stream = rates["copy-add of three arrays"]
    rows = tuple((name, f"{1e3 * medians[name]:.1f}", f"{ways[name].bytes}", f"{rates[name]:.1f}",
                  f"{rates[name] / stream:.2f}") for name in ways)
    Outcome(benchmark="optimizer", command=" ".join(["python", *sys.argv]),
            note=f"{options.elements:,} elements, {options.threads} thread(s), {options.rounds} rounds.{skipped}",
            sheets=(Sheet(title="An optimizer step", rows=rows,
                          columns=("way", "median ms", "bytes an element", "GB/s", "x copy-add")),),
            targets=tuple(_targets(seconds, ways)), raw=seconds).publish(options.out)


def _targets(seconds: dict[str, list[float]], ways: dict[str, Way]) -> Generator[Target]:
    def times(theirs: str, mine: str) -> list[float]:
        return [other / own for other, own in zip(seconds[theirs], seconds[mine], strict=True)]

    stream, ours = "copy-add of three arrays", "native, fp32"
    yield Target.over([ways[ours].bytes / ways[stream].bytes * each for each in times(stream, ours)], low=0.85,
                      what="fp32: bytes per second over those of the copy-add")
    for what, theirs, mine, low in (
            ("fp32: times faster than torch's fused AdamW", "torch fused, fp32", "native, fp32", 1.0),
            ("fp32: times faster than DeepSpeedCPUAdam", PEERS_OF["float32"], "native, fp32", 1.0),
            ("bf16 in and out: times faster than casts around torch's", "torch fused, bf16", "native, bf16", 1.3),
            ("bf16 in and out: times faster than casts around DeepSpeedCPUAdam", PEERS_OF["bfloat16"], "native, bf16", 1.3)):
        if theirs in seconds:
            yield Target.over(times(theirs, mine), what=what, low=low)


def _turns(ways: dict[str, Way], rounds: int, tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the seconds of each way in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        tell(f"round {number} of {rounds}")
        shift, order = number % len(ways), list(ways)
        for name in (*order[shift:], *order[:shift]):
            taken = ways[name].turn()
            if number:  # the first round finds cold pages
                seconds[name].append(taken)
    return seconds


@contextmanager
def _peer(elements: int, threads: int, dtype: str, tell: Callable[[str], None]) -> Generator[Way | str]:
    """Yield DeepSpeedCPUAdam in a process of its own, asleep between its turns; or why it is skipped."""
    if not PEERS.exists():
        yield "skipped: no .venv-peers (make peers)"
        return
    tell(f"{PEERS_OF[dtype]}: building its op")
    place = {**os.environ, **peer_environment(), "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(
            [PEERS, CHILD, str(elements), dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=place) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            if child.stdout.readline() == "ready\n":
                yield Way(turn=lambda: _ordered(child), bytes=28)
            else:
                child.wait()
                log.seek(0)
                words = [line.strip() for line in log if line.strip()]
                yield f"skipped: {words[-1] if words else 'it died without an error'}"
        finally:
            child.kill()


def _ordered(child: subprocess.Popen[str]) -> float:
    """Let the child take its turn, and return the seconds that it says."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=30_000_000, help="length of the slice (30 million)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way (15)")
    parser.add_argument("--threads", type=int, default=1, help="threads (1)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/optimizer.json)")
    return parser.parse_args()


def _ways(elements: int) -> dict[str, Way]:
    """Return the ways of this process."""
    a, b, c = (torch.randn(elements) for _ in range(3))
    return {
        "copy-add of three arrays": Way(turn=_timed(lambda: _copy_add(a, b, c)), bytes=12),
        "torch fused, fp32": Way(turn=_timed(_torch(elements, torch.float32)), bytes=28),
        "native, fp32": Way(turn=_timed(_native(elements, torch.float32)), bytes=28),
        "torch fused, bf16": Way(turn=_timed(_torch(elements, torch.bfloat16)), bytes=28),
        "native, bf16": Way(turn=_timed(_native(elements, torch.bfloat16)), bytes=28),
    }


def _timed(call: Callable[[], None]) -> Callable[[], float]:
    def turn() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return turn


def _copy_add(a: Tensor, b: Tensor, c: Tensor) -> None:
    torch.add(a, b, out=c)


def _torch(elements: int, dtype: torch.dtype) -> Callable[[], None]:
    master = torch.nn.Parameter(torch.randn(elements))
    gradient, weight = torch.randn(elements).to(dtype), torch.empty(elements, dtype=dtype)
    master.grad = gradient.to(torch.float32)
    buffer = master.grad
    optimizer = torch.optim.AdamW([master], lr=1e-3, fused=True)

    def way() -> None:
        if dtype != torch.float32:
            buffer.copy_(gradient)
        optimizer.step()
        if dtype != torch.float32:
            weight.copy_(master.detach())

    return way


def _native(elements: int, dtype: torch.dtype) -> Callable[[], None]:
    master, gradient = torch.randn(elements), torch.randn(elements).to(dtype)
    moments = [torch.zeros(elements), torch.zeros(elements)]
    weight = None if dtype == torch.float32 else torch.empty(elements, dtype=dtype)
    return lambda: step(Rule.ADAMW, master, moments, gradient, CONSTANTS, weight=weight)


if __name__ == "__main__":
    main()
