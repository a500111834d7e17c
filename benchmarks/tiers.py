"""State on the host and on disk: what an iteration costs beside one without, beside its own I/O, and what memory it takes.

    python benchmarks/tiers.py [--path FOLDER] [--rounds 5] [--layers 12] [--dim 640] [--threads 1]

Four engines and two replays of one process take turns: no tier, offload to the host, everything on disk, and the bytes of
an iteration on disk without its arithmetic; and DeepSpeed's stage 3 offloading to the host and to disk, in processes of
their own (tiers_peer.py, after `make peers`), the latter with the fastest of the settings `AIO`. A disk's step is taken
after backward and clipped (the default), or in backward and unclipped (`step_in_backward` true). Each batch size is a row:
small ones are bound by the disk, large ones by arithmetic. Before that processes by themselves train for a while, and their
memory is held against the estimate.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Self

import torch
from machine import PEERS, peer_environment
from progress import progress
from replay import Replay
from results import Outcome, Sheet, Target, spread_ratio
from workloads import _example

import shoal

MEBI = 1 << 20
LEAST = 3
"""Iterations of a turn at least, beside the one before them, which is not counted: it leaves the first its step to take, as
any iteration of a training does, and as the last leaves its own."""
DISKS = {"in backward": (True, 0.0), "after backward": (False, 1.0)}
"""The ways with everything on disk: `step_in_backward`, and the largest norm."""
CHUNKS = 8
"""Pieces of state in memory at once: with the default of 4 steps in backward take some 7 % longer here."""
MEMORY = Path(__file__).with_name("tiers_memory.py")
PEER = Path(__file__).with_name("tiers_peer.py")
PEER_DEVICES = {"host": "cpu", "after backward": "nvme"}
"""The device of DeepSpeed that does what a way of ours does."""
AIO = [{"block_size": block << 20, "queue_depth": depth, "intra_op_parallelism": threads}
       for threads, depth, block in product((1, 2), (8, 32), (1, 8))]
"""Settings of DeepSpeed's disk I/O, each tried at the fewest tokens, where the disk is the bound."""


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    options.path.mkdir(parents=True, exist_ok=True)
    shoal.init_distributed()
    with progress() as tell, tempfile.TemporaryDirectory(dir=options.path) as folder:
        held = {way: _memory(folder, way, 60, options.dim, options.layers, tell) for way in DISKS}
        growth = _memory(folder, "after backward", options.steps, 256, 8, tell)
        rows, beside, raw = list[tuple[str, ...]](), list[tuple[str, ...]](), dict[str, Any]()
        tried = _tuned(options, folder, tell)
        with ExitStack() as stack:
            peers = {way: stack.enter_context(Peer(device, folder, options, min(tried, key=lambda each: each.seconds).aio))
                     for way, device in PEER_DEVICES.items()}
            for tokens in options.tokens:
                found = _turns(options, folder, tokens, peers, tell)
                raw[str(tokens)] = found
                rows += [_row(tokens, found, way) for way in DISKS]
                beside += _beside(tokens, found)
            missing = [f"DeepSpeed, {way}: {peer.failure}." for way, peer in peers.items() if peer.failure]
    columns = ("tokens, on disk stepped", "no tier ms", "host ms", "x none", "disk ms", "I/O apart ms", "x max(none, I/O)",
               "MiB read", "MiB written")
    sheets = [Sheet(title="An iteration", columns=columns, rows=tuple(rows)),
              Sheet(title="Beside DeepSpeed's offload at stage 3", rows=tuple(beside), columns=(
                  "tokens, state", "Shoal ms", "DeepSpeed ms", "DeepSpeed's over Shoal's")),
              Sheet(title=f"DeepSpeed on disk at several settings, {min(options.tokens)} tokens", columns=(
                  "aio", "ms an iteration"), rows=tuple(each.row for each in tried))]
    _publish(options, sheets, held, growth, raw, missing)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path("out/benchmarks/disk"), help="a folder of the disk")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (5)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn, of three iterations at least (8)")
    parser.add_argument("--layers", type=int, default=12, help="blocks of the GPT (12)")
    parser.add_argument("--dim", type=int, default=640, help="its width (640)")
    parser.add_argument("--tokens", type=int, nargs="+", default=(64, 256, 1024),
                        help="tokens of an iteration (64 256 1024)")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute (1)")
    parser.add_argument("--steps", type=int, default=500, help="steps over which memory must be flat (500)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/tiers.json)")
    return parser.parse_args()


def config(tier: dict[str, Any], clipping: float = 1.0) -> dict[str, Any]:
    """Return the configuration of an engine: stage 3, AdamW."""
    return {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": clipping, "zero_optimization": {"stage": 3, **tier},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}}


def on_disk(folder: str, way: str) -> dict[str, Any]:
    """Return the configuration of an engine with everything on disk, in one of the ways."""
    disk, (in_backward, clipping) = {"device": "nvme", "nvme_path": folder}, DISKS[way]
    return config({"offload_param": {**disk, "buffer_count": 3},
                   "offload_optimizer": {**disk, "buffer_count": CHUNKS, "step_in_backward": in_backward}}, clipping)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A setting of DeepSpeed's disk I/O, and the seconds of an iteration; infinite where it failed."""

    aio: dict[str, int]
    seconds: float

    @property
    def row(self) -> tuple[str, str]:
        return ", ".join(f"{key} {value}" for key, value in self.aio.items()), f"{1e3 * self.seconds:.0f}"


def _tuned(options: argparse.Namespace, folder: str, tell: Callable[[str], None]) -> list[Tried]:
    """Let DeepSpeed train from disk with each setting, in a process of its own; only the first where it is not installed."""
    tried: list[Tried] = []
    for aio in AIO if PEERS.exists() else AIO[:1]:
        tell(f"DeepSpeed on disk: {aio}")
        with Peer("nvme", folder, options, aio) as peer:
            peer.iterations(min(options.tokens), LEAST)  # makes the moments, and finds cold pages
            seconds = peer.iterations(min(options.tokens), LEAST)
            tried.append(Tried(aio=aio, seconds=math.inf if peer.failure else seconds))
        if len(tried) == 1 and peer.failure:  # it is not the setting that fails
            break
    return tried


class Peer:
    """DeepSpeed in a process of its own, asleep between its turns."""

    def __init__(self, device: str, folder: str, options: argparse.Namespace, aio: dict[str, int]) -> None:
        self.failure = "" if PEERS.exists() else "skipped: no .venv-peers (make peers)"
        job = {"device": device, "path": folder, "layers": options.layers, "dim": options.dim, "threads": options.threads,
               "aio": aio}
        self._command = [str(PEERS), str(PEER), json.dumps(job)]
        self._threads = options.threads
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  for as long as the child lives
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if not self.failure:
            place = {**os.environ, **peer_environment(), "OMP_NUM_THREADS": str(self._threads), "GLOO_SOCKET_IFNAME": "lo",
                     "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
            self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                                           text=True, env=place)
            self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def iterations(self, tokens: int, count: int) -> float:
        """Run so many, and return the seconds of one; not-a-number once it has failed."""
        if self.failure:
            return math.nan
        assert self._child is not None and self._child.stdin is not None
        self._child.stdin.write(json.dumps({"tokens": tokens, "count": count}) + "\n")
        self._child.stdin.flush()
        return float(self._answer() or "nan")

    def _answer(self) -> str:
        assert self._child is not None and self._child.stdout is not None
        if not (line := self._child.stdout.readline()):
            self._log.seek(0)
            words = [line.strip() for line in self._log if line.strip()]
            self.failure = words[-1] if words else "it died without an error"
        return line


def _turns(options: argparse.Namespace, folder: str, tokens: int, peers: dict[str, Peer],
           tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the seconds of each way's iterations, and the bytes of one on disk."""
    engines, replays = _built(options, folder)
    sharded = engines["after backward"].sharded
    assert sharded is not None
    swap = sharded.storage.swaps[0]  # the file is that of all
    order = [name for way in engines for name in (way, f"{way} apart") if name in {*engines, *replays}]  # neighbours in time
    ways = {name: replays[name].iteration if name in replays else _iteration(engines[name], tokens) for name in order}
    found: dict[str, list[float]] = {name: [] for name in ways}
    found |= {f"{way} {what}": [] for way in DISKS for what in ("read", "written")}
    others = {f"deepspeed {way}": peer for way, peer in peers.items() if not peer.failure}
    found |= {name: [] for name in others}
    everyone = [*order, *others]
    count, longest = LEAST, 0.0
    for number in range(options.rounds + 1):
        shift = number % len(everyone)
        for name in (*everyone[shift:], *everyone[:shift]):
            tell(f"{tokens} tokens, round {number} of {options.rounds}: {name}")
            if name in others:
                others[name].iterations(tokens, 1)  # not counted, as of the others
                taken = others[name].iterations(tokens, count)
                if number and not others[name].failure:
                    found[name].append(taken)
                continue
            ways[name]()
            before, start = (swap.read_bytes, swap.written_bytes), time.perf_counter()
            for _ in range(count):
                ways[name]()
            taken, after = (time.perf_counter() - start) / count, (swap.read_bytes, swap.written_bytes)
            for each in (*engines.values(), *replays.values()):  # nothing of this turn falls into the next
                each.wait() if isinstance(each, Replay) else wait_for_steps(each)
            longest = max(longest, taken)
            if number:  # the first turn makes the moments, and finds cold pages
                found[name].append(taken)
                if name in DISKS:
                    found[f"{name} read"].append((after[0] - before[0]) / count)
                    found[f"{name} written"].append((after[1] - before[1]) / count)
        if not number:
            count = max(LEAST, round(options.seconds / longest))
    for each in (*replays.values(), *engines.values()):
        each.close() if isinstance(each, Replay) else each.destroy()
    return found


def _built(options: argparse.Namespace, folder: str) -> tuple[dict[str, shoal.Engine], dict[str, Replay]]:
    """Return the engines, one a way, and for those on disk what moves their bytes alone."""
    model = _example("gpt/model.py")
    shape = model.Shape(layers=options.layers, dim=options.dim, heads=options.dim // 64)
    host = {"device": "cpu"}
    configs = {"none": config({}), "host": config({"offload_param": host, "offload_optimizer": host}),
               **{way: on_disk(folder, way) for way in DISKS}}
    engines: dict[str, shoal.Engine] = {}
    for name, given in configs.items():
        torch.manual_seed(0)
        engines[name] = shoal.initialize(model=shape.build(), config=given)[0]
    sharded = engines["after backward"].sharded
    assert sharded is not None
    units = [unit.layout.size for unit in sharded.units]
    return engines, {
        f"{way} apart": Replay(folder, units, buffers=3, chunks=CHUNKS, in_backward=in_backward)
        for way, (in_backward, _) in DISKS.items()}


def wait_for_steps(engine: shoal.Engine) -> None:
    """Wait for the steps that units on disk still owe."""
    assert engine.optimizer is not None
    engine.optimizer.finish_deferred_steps()


def _iteration(engine: shoal.Engine, tokens: int) -> Callable[[], object]:
    x = torch.randint(256, (max(1, tokens // 256), min(tokens, 256)), generator=torch.Generator().manual_seed(0))

    def iteration() -> None:
        engine.backward(engine(x, x))
        engine.step()

    return iteration


def _row(tokens: int, found: dict[str, list[float]], way: str) -> tuple[str, ...]:
    middle = {name: statistics.median(values) for name, values in found.items()}
    return (f"{tokens}, {way}", *(f"{1e3 * middle[name]:.0f}" for name in ("none", "host")),
            f"{statistics.median(_ratios(found, 'host', 'none')):.2f}",
            *(f"{1e3 * middle[name]:.0f}" for name in (way, f"{way} apart")),
            f"{statistics.median(_overlaps(found, way)):.2f}",
            *(f"{middle[f'{way} {what}'] / MEBI:.0f}" for what in ("read", "written")))


def _beside(tokens: int, found: dict[str, list[float]]) -> list[tuple[str, ...]]:
    """Return the rows that compare with DeepSpeed, where it ran to the end."""
    rows: list[tuple[str, ...]] = []
    for way, where in (("host", "on the host"), ("after backward", "on disk, stepped after backward")):
        ours, peer = found[way], found.get(f"deepspeed {way}", [])  # both clip; ours that step in backward do not
        if len(peer) == len(ours):
            rows.append((f"{tokens}, {where}", *(f"{1e3 * statistics.median(each):.0f}" for each in (ours, peer)),
                         spread_ratio(_ratios(found, f"deepspeed {way}", way))))
    return rows


def _ratios(found: dict[str, list[float]], one: str, other: str) -> list[float]:
    return [a / b for a, b in zip(found[one], found[other], strict=True)]


def _overlaps(found: dict[str, list[float]], way: str) -> list[float]:
    """Return the iteration of `way` over the longer of computing and its I/O, each by itself, by round."""
    return [disk / max(none, apart)
            for disk, none, apart in zip(found[way], found["none"], found[f"{way} apart"], strict=True)]


def _memory(folder: str, way: str, steps: int, dim: int, layers: int, tell: Callable[[str], None]) -> dict[str, float]:
    """Train a GPT by itself in a process, and return what it says of its memory."""
    tell(f"memory over {steps} steps {way}: {layers} blocks of width {dim}")
    done = subprocess.run([sys.executable, str(MEMORY), folder, way, *map(str, (steps, dim, layers))], capture_output=True,
                          text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _publish(options: argparse.Namespace, iterations: Sequence[Sheet], held: dict[str, dict[str, float]],
             growth: dict[str, float], raw: dict[str, Any], missing: Sequence[str]) -> None:
    rows = tuple((name, *(f"{found[name] / MEBI:.1f}" for found in (*held.values(), growth))) for name in growth)
    memory = Sheet(title="Resident memory over 60 steps, everything on disk", rows=rows,
                   columns=("MiB", *(f"stepped {way}" for way in DISKS), f"8 blocks of width 256, {options.steps} steps"))
    targets = [
        *(Target.over(_overlaps(found, way), high=1.15,
                      what=f"{tokens} tokens: iteration on disk, stepped {way}, over max(computing, I/O) apart")
          for tokens, found in raw.items() for way in DISKS),
        *(Target.over(_ratios(found, "host", "none"), high=1.10,
                      what=f"{tokens} tokens: iteration with offload to the host over one without")
          for tokens, found in raw.items()),
        *(Target.over(_ratios(found, f"deepspeed {way}", way), low=1.0,
                      what=f"{tokens} tokens: DeepSpeed's iteration over ours, {way}")
          for tokens, found in raw.items() for way in PEER_DEVICES
          if len(found.get(f"deepspeed {way}", [])) == len(found[way])),
        *(Target(what=f"peak resident memory over the estimate, stepped {way}", low=0.9, high=1.1,
                 measured=found["peak"] / found["estimate"]) for way, found in held.items()),
        Target(what=f"resident memory after {options.steps} steps over that after 50", high=1.02,
               measured=growth["after all steps"] / growth["after 50 steps"]),
    ]
    note = (f"GPT of {options.layers} blocks of width {options.dim}, fp32, stage 3 on one rank, AdamW, clipped where "
            f"stepped after backward, {options.threads} thread(s), {options.rounds} rounds of turns of about "
            f"{options.seconds:g} s. I/O apart has {CHUNKS} chunks of state in memory at once, as the engine. "
            f"{' '.join(missing)}")
    Outcome(benchmark="tiers", command=" ".join(["python", *sys.argv]), note=note, sheets=(*iterations, memory),
            targets=tuple(targets), raw=raw).publish(options.out)


if __name__ == "__main__":
    main()
