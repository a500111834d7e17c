"""State that rests on a disk, beside fio at its best: bytes per second, and processor time per byte.

    python benchmarks/disk.py FOLDER [--size 1024] [--rounds 7] [--block 1024] [--requests 8]

A span of `size` MiB in a swap file of FOLDER is read, written, and both (fetched, changed, committed), chunk after chunk
with a few fetched ahead, as a step of the optimizer does it; checksums, and the faults of the pages that come and go, are
part of it, and so is filling or changing the memory where it is written, with random bytes, no two chunks alike. fio moves
as many random bytes from and to warm buffers, of which it changes some bytes for each request (scramble_buffers, its
default). Before the rounds it does so with every engine of `ENGINES` at every depth of `DEPTHS`, and the fastest of each way
counts: it takes turns with ours, and ratios are taken within a round. Without fio there are no ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from results import Outcome, Sheet, Target, spread_ratio
from torch import Tensor

from shoal.tier.disk_span import CHUNK, DiskSpan
from shoal.tier.span import Transfer
from shoal.tier.swap import Swap

GIGA = 1e9
AHEAD = 8
"""Chunks that are fetched before the one in use is done."""
WAYS = ("read", "write", "both")
ENGINES = ("libaio", "io_uring", "psync")
"""Of fio; psync, which waits for each request, has a thread for each."""
DEPTHS = (4, 8, 16, 32)
SWEEPS = 2
"""Runs of each engine and depth, of which the faster counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How fio moves bytes."""

    engine: str
    depth: int

    @property
    def words(self) -> list[str]:
        threads = self.engine == "psync"
        return [f"--ioengine={self.engine}", f"--iodepth={1 if threads else self.depth}",
                f"--numjobs={self.depth if threads else 1}"]

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.depth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Bytes per second, and processor seconds per gigabyte."""

    rate: float
    processor: float


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    found: dict[str, list[Speed]] = {}
    swept = _sweep(options) if shutil.which("fio") else {}
    best = {way: max(speeds, key=lambda setting: speeds[setting].rate) for way, speeds in swept.items()}
    swap = Swap(options.folder, block_bytes=options.block << 10, requests=options.requests)
    try:
        if not swap.direct:
            sys.exit(f"disk: {options.folder} does not support direct I/O: figures would be of the page cache; give a "
                     f"folder of a local disk")
        span = DiskSpan(swap, (options.size << 20) // 4, torch.float32, "the span")
        ways = _ways(span)
        ways["write"]()  # the first writing of a file is slower than any later one
        for number in range(options.rounds + 1):
            for who, way in product(("fio", "shoal") if best else ("shoal",), WAYS):
                size = span.tensor.nbytes * (2 if way == "both" else 1)
                speed = _fio(way, best[way], options) if who == "fio" else _timed(ways[way], size)
                if number:  # the first round makes fio's file
                    found.setdefault(f"{who}, {way}", []).append(speed)
    finally:
        swap.close()
        _fio_file(options).unlink(missing_ok=True)
    _publish(found, swept, best, options)


def _sweep(options: argparse.Namespace) -> dict[str, dict[Setting, Speed]]:
    """Return the speed of fio by way and setting; an engine that the system does not have is left out."""
    found: dict[str, dict[Setting, Speed]] = {way: {} for way in WAYS}
    for engine, depth, way in product(ENGINES, DEPTHS, WAYS):
        setting = Setting(engine=engine, depth=depth)
        try:
            found[way][setting] = max((_fio(way, setting, options) for _ in range(SWEEPS)), key=lambda speed: speed.rate)
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"fio, {setting.name}: left out: {error.stderr.strip()[-200:]}\n")
    return found


def _publish(found: dict[str, list[Speed]], swept: dict[str, dict[Setting, Speed]], best: dict[str, Setting],
             options: argparse.Namespace) -> None:
    ratios = {way: [mine.rate / theirs.rate
                    for mine, theirs in zip(found[f"shoal, {way}"], found[f"fio, {way}"], strict=True)]
              for way in WAYS if f"fio, {way}" in found}
    rows: list[tuple[str, ...]] = []
    for way in WAYS:
        for who in ("fio", "shoal"):
            if (speeds := found.get(f"{who}, {way}")) is None:
                continue
            ratio = spread_ratio(ratios[way]) if who == "shoal" and way in ratios else ""
            name = f"{who}, {way}" + (f" ({best[way].name})" if who == "fio" else "")
            rows.append((name, f"{statistics.median(speed.rate for speed in speeds) / GIGA:.2f}", ratio,
                         f"{statistics.median(speed.processor for speed in speeds):.2f}"))
    targets = tuple(Target.over(found, what=f"{way}: bytes per second over those of fio", low=0.9)
                    for way, found in ratios.items())
    settings = list(dict.fromkeys(setting for speeds in swept.values() for setting in speeds))
    table = [(setting.name, *(_both(speeds.get(setting)) for speeds in swept.values())) for setting in settings]
    Outcome(benchmark="disk", command=" ".join(["python", *sys.argv]),
            note=(f"{options.size} MiB of random bytes, blocks of {options.block} KiB, {options.requests} requests of ours, "
                  f"{options.rounds} rounds. fio at the fastest engine and depth of its sweep, of which the faster of "
                  f"{SWEEPS} "
                  f"runs counts; ratios with their quartiles."),
            sheets=(Sheet(title="State on disk", rows=tuple(rows),
                          columns=("way", "median GB/s", "x fio", "processor s/GB")),
                    Sheet(title="fio by engine and depth: GB/s (processor s/GB)", rows=tuple(table),
                          columns=("engine, depth", *WAYS))),
            targets=targets, raw={name: [asdict(speed) for speed in speeds] for name, speeds in found.items()},
            ).publish(options.out)


def _both(speed: Speed | None) -> str:
    return f"{speed.rate / GIGA:.2f} ({speed.processor:.2f})" if speed else "-"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder on the disk")
    parser.add_argument("--size", type=int, default=1024, help="MiB of the span (1024)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (7)")
    parser.add_argument("--block", type=int, default=1024, help="KiB of a request (1024)")
    parser.add_argument("--requests", type=int, default=8, help="requests under way (8)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/disk.json)")
    return parser.parse_args()


def _ways(span: DiskSpan) -> dict[str, Callable[[], None]]:
    noise = torch.randint(256, (4 * CHUNK,), dtype=torch.uint8).view(torch.int32)

    def fill(chunk: Tensor, number: int) -> None:
        torch.bitwise_xor(noise[:chunk.numel()], number, out=chunk.view(torch.int32))

    return {"read": lambda: _pass_over(span, None),
            "write": lambda: _pass_over(span, fill, fresh=True),
            "both": lambda: _pass_over(span, lambda chunk, number: chunk.add_(1))}


def _pass_over(span: DiskSpan, change: Callable[[Tensor, int], object] | None, *, fresh: bool = False) -> None:
    """Fetch every chunk, `change` it, given its number, if that is asked for, and commit it; end when all have arrived."""
    size = span.tensor.numel()
    parts = [range(start, min(size, start + CHUNK)) for start in range(0, size, CHUNK)]
    arriving = deque[Transfer]()
    leaving: list[Transfer] = []
    for number, part in enumerate(parts):
        for ahead in parts[number if number == 0 else number + AHEAD:number + AHEAD + 1]:
            arriving.append(span.fetch(ahead.start, ahead.stop, fresh=fresh))
        arriving.popleft().wait()
        if change is not None:
            change(span.tensor[part.start:part.stop], number)
        leaving.append(span.commit(part.start, part.stop, changed=change is not None))
    for transfer in leaving:
        transfer.wait()


def _timed(way: Callable[[], None], size: int) -> Speed:
    before, start = _processor(), time.perf_counter()
    way()
    seconds, used = time.perf_counter() - start, _processor() - before
    return Speed(rate=size / seconds, processor=used / size * GIGA)


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _fio(way: str, setting: Setting, options: argparse.Namespace) -> Speed:
    """Let fio move the bytes that a way moves; reading and writing at once are half reads and half writes."""
    size, jobs = options.size * (2 if way == "both" else 1), setting.depth if setting.engine == "psync" else 1
    share = options.size // jobs
    command = ["fio", "--name=disk", f"--filename={_fio_file(options)}", f"--filesize={options.size}M", f"--size={share}M",
               f"--offset_increment={share}M", f"--io_size={size // jobs}M", f"--rw={'rw' if way == 'both' else way}",
               f"--bs={options.block}k", *setting.words, "--thread", "--group_reporting", "--direct=1",
               "--output-format=json"]
    job = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"][0]
    rate = job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
    return Speed(rate=rate, processor=jobs * (job["usr_cpu"] + job["sys_cpu"]) / 100 / rate * GIGA)


def _fio_file(options: argparse.Namespace) -> Path:
    return options.folder / "shoal-benchmark-fio.tmp"


if __name__ == "__main__":
    main()
