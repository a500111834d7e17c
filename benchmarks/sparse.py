"""An embedding of 200,000 rows on two hosts with a slow link: by rows beside dense gradients, at every stage.

    python benchmarks/sparse.py [--rate 1gbit] [--stages 0 1 2 3]
    python benchmarks/sparse.py --rule      # what a byte of a row costs: between such hosts, and on one machine

Hosts are those of hosts.py, with one rank of one thread each. All ways train the same model on the same batches, in turns; a
ratio is taken within a round. At stage 0 DDP with sparse gradients stands beside them, with torch's optimizers of sparse
gradients. Without --rule it needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from hosts import Hosts, HostsUnavailable
from interleave import Plan
from progress import progress
from results import Outcome, Sheet, Target, spread_ratio
from sweep import Cell, Found, sweep
from workloads import parameters

from shoal.sparse.row_exchange import RowExchange, changed_rows
from shoal.testing import run_ranks
from shoal.transport.collectives import Communicator, Label

FEWER, FASTER = 6.0, 3.0  # bytes, and samples a second, over those of dense gradients
ROWS, COLUMNS = 200_000, 128
OPTIMIZERS = {0: ["Adam", "Adagrad"], 1: ["Adagrad"], 2: ["Adagrad"], 3: ["Adam"]}
"""Adam moves a row for long after it was touched: where changed weights are published, a turn of some steps is no measure of
it, for ever more rows change until most do."""
DENSITIES = (0.02, 0.1, 0.25, 0.5, 0.75, 1.0)


def main() -> None:
    options = _options()
    if options.costs:
        dist.init_process_group("gloo")
        found = costs(False, options.rounds)
        sys.stdout.write(json.dumps({"costs": [(density, *pair) for density, pair in found.items()]}) + "\n")
        return
    if options.rule:
        _rule(options)
        return
    plan = Plan(workload="towers", ranks=2, rounds=options.rounds, steps=0, warm=6, microbatch=options.batch,
                length=options.length)
    cases = [(stage, optimizer) for stage in options.stages for optimizer in options.optimizers or OPTIMIZERS[stage]]
    results: dict[tuple[int, str], Found] = {}
    try:
        with Hosts(plan.ranks) as hosts, progress() as tell:
            for stage, optimizer in cases:
                names = [f"{way}-{stage}-{optimizer}" for way in ("dense", "rows")]
                whole = (6 if stage == 3 else 4) * parameters("towers")
                sends = {names[0]: float(whole), names[1]: whole / 8}
                if stage == 0:  # nothing is sharded, as under DDP
                    names.append(f"ddp-rows-{optimizer}")
                    sends[names[-1]] = whole / 8
                results[stage, optimizer] = sweep(names, plan, [options.rate], hosts, sends=sends, seconds=options.seconds,
                                                  tell=tell)
    except HostsUnavailable as reason:
        sys.stderr.write(f"skipped: {reason}\n")
        return
    _outcome(results, plan, options).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the links (1gbit)")
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3], help="of ZeRO (all)")
    parser.add_argument("--optimizers", nargs="+", choices=("Adam", "Adagrad"),
                        help="at every stage (Adam, and Adagrad at stages 1 and 2)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way (3)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn, in which at least 2 steps are counted (5)")
    parser.add_argument("--batch", type=int, default=32, help="pairs of query and passage a rank and step (32)")
    parser.add_argument("--length", type=int, default=48, help="words of a query or passage (48)")
    parser.add_argument("--rule", action="store_true", help="measure what a byte of a row costs instead")
    parser.add_argument("--costs", action="store_true", help=argparse.SUPPRESS)  # what --rule runs on each host
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/sparse.json)")
    return parser.parse_args()


def _times(mine: Cell, theirs: Cell) -> list[float]:
    """Return how many times as fast a system is as another, by round."""
    return [statistics.median(other) / statistics.median(own)
            for own, other in zip(mine.seconds, theirs.seconds, strict=True)]


def _outcome(found: dict[tuple[int, str], Found], plan: Plan, options: argparse.Namespace) -> Outcome:
    rows: list[tuple[str, ...]] = []
    beside: list[tuple[str, ...]] = []
    targets: list[Target] = []
    for (stage, optimizer), each in found.items():
        dense, ours = (each.cell(f"{way}-{stage}-{optimizer}", options.rate) for way in ("dense", "rows"))
        name = f"stage {stage}, {optimizer}"
        if dense is None or ours is None:
            rows.append((name, *["-"] * 6, "; ".join(each.failures.values())))
            continue
        bytes = [statistics.median(cell.sent) for cell in (dense, ours)]
        samples = plan.ranks * plan.microbatch
        speeds = [statistics.median(samples / statistics.median(turn) for turn in cell.seconds) for cell in (dense, ours)]
        times = _times(ours, dense)
        losses = [each.losses[f"{way}-{stage}-{optimizer}"] for way in ("dense", "rows")]
        rows.append((name, *(f"{sent / 1e6:.2f}" for sent in bytes), f"{bytes[0] / bytes[1]:.1f}",
                     *(f"{speed:.1f}" for speed in speeds), f"{statistics.median(times):.2f}",
                     f"{abs(losses[0] - losses[1]):.1e}"))
        if (ddp := each.cell(f"ddp-rows-{optimizer}", options.rate)) is not None:
            ratios = _times(ours, ddp)
            sent, apart = statistics.median(ddp.sent), abs(each.losses[f"ddp-rows-{optimizer}"] - losses[1])
            beside.append((optimizer, f"{bytes[1] / 1e6:.2f}", f"{sent / 1e6:.2f}", f"{speeds[1]:.1f}",
                           f"{statistics.median(samples / statistics.median(turn) for turn in ddp.seconds):.1f}",
                           spread_ratio(ratios), f"{apart:.1e}"))
            targets.append(Target.over(ratios, what=f"{name}: samples a second over DDP's with sparse gradients", low=1.0))
        targets += [Target(what=f"{name}: bytes of dense over bytes of rows", low=FEWER, high=float("inf"),
                           measured=bytes[0] / bytes[1]),
                    Target.over(times, what=f"{name}: samples a second over dense", low=FASTER),
                    Target(what=f"{name}: losses differ by", high=1e-6, measured=abs(losses[0] - losses[1]))]
    sheet = Sheet(title=f"At {options.rate}", columns=("", "dense, MB a step", "rows, MB a step", "times fewer",
                                                       "dense, samples/s", "rows, samples/s", "times as fast",
                                                       "losses differ by"), rows=tuple(rows))
    other = Sheet(title=f"Beside DDP with sparse gradients, at {options.rate}, stage 0", rows=tuple(beside), columns=(
        "optimizer", "ours, MB a step", "DDP, MB a step", "ours, samples/s", "DDP, samples/s", "times as fast",
        "losses differ by"))
    note = (f"Two towers over one embedding of {ROWS:,} x {COLUMNS} and a bidirectional GRU, {parameters('towers'):,} "
            f"parameters, fp32, {plan.ranks} hosts with one gloo rank of one thread each, {2 * plan.microbatch} texts of "
            f"{plan.length} words by Zipf's law a rank and step, lr 1e-3, no clipping, no weight decay. Bytes are those "
            f"of the busiest interface, headers included; {plan.rounds} rounds of at most 8 counted steps; the median "
            f"over rounds. Losses are those after {plan.warm} steps. Under DDP Adam is torch's SparseAdam for the "
            f"embedding, which "
            f"leaves the moments of untouched rows as they are, so that its losses are others.")
    return Outcome(benchmark="sparse", command=" ".join(["python", *sys.argv]), note=note, sheets=(sheet, other),
                   targets=tuple(targets), raw={"plan": asdict(plan),
                                                **{f"{stage} {optimizer}": asdict(each)
                                                   for (stage, optimizer), each in found.items()}})


def _rule(options: argparse.Namespace) -> None:
    """Print what a byte of a row costs over one of the whole, by density: between hosts, and on one machine."""
    found: dict[str, dict[float, tuple[float, float]]] = {}
    try:
        with Hosts(2, rate=options.rate) as hosts:
            said = hosts.launch([Path(__file__), "--costs", "--rounds", str(options.rounds)], seconds=300.0)
            found[options.rate] = {density: (reduce, publish) for density, reduce, publish in said[0][-1]["costs"]}
    except HostsUnavailable as reason:
        sys.stderr.write(f"skipped: {reason}\n")
    found["sockets"] = run_ranks(2, costs, False, options.rounds)[0]
    found["memory"] = run_ranks(2, costs, True, options.rounds)[0]
    rows = [(f"{density:g}", *(f"{costs[density][kind]:.2f}" for costs in found.values() for kind in range(2)))
            for density in DENSITIES]
    sheet = Sheet(title="Cost of a byte of a row, in bytes of the whole", rows=tuple(rows), columns=(
        "rows touched", *(f"{kind}, {where}" for where in found for kind in ("reduce", "publish"))))
    Outcome(benchmark="sparse-rule", command=" ".join(["python", *sys.argv]), sheets=(sheet,), targets=(), raw=found,
            note=f"A table of {ROWS:,} x {COLUMNS} in fp32 between two ranks of one thread, each touching as many rows at "
                 f"random: seconds a byte by rows over seconds a byte of the whole. Reduce is from the gradient that "
                 f"autograd gives to the sum; publish from the stepped weights to the others' copy. Between hosts with that "
                 f"link; on one machine through sockets; and there with the whole read from the other rank's memory."
            ).publish(options.out)


def costs(direct: bool, rounds: int) -> dict[float, tuple[float, float]]:
    """Return, on each of two ranks, the cost of a byte of a row by density: of a reduction, and of a publication."""
    assert dist.group.WORLD is not None
    communicator = Communicator(dist.group.WORLD, timeout=60, direct_bytes=256 << 10 if direct else None)
    size, index = ROWS * COLUMNS, communicator.register()
    rows = RowExchange(communicator, size, COLUMNS, torch.float32, torch.float32, torch.device("cpu"), unit="table",
                       index=index)
    label = Label(kind="reduce", unit="table", index=index)
    source, full = torch.randn(size), torch.randn(size)
    staging, target = torch.empty(size // 2), torch.empty(size // 2)
    mine = full.view(ROWS, COLUMNS)[communicator.rank * ROWS // 2:][:ROWS // 2]

    def reduce_whole() -> None:
        source.copy_(full)
        communicator.reduce_scatter(source, target, staging, label, scale=1.0, accumulate=False).wait()

    def publish_whole() -> None:
        communicator.all_gather(full, label).wait()

    whole = [_seconds(action, rounds) / (size * 2) for action in (reduce_whole, publish_whole)]
    found: dict[float, tuple[float, float]] = {}
    for density in DENSITIES:
        touched = torch.randperm(ROWS)[:int(density * ROWS)]
        gradient = torch.sparse_coo_tensor(touched[None], torch.randn(len(touched), COLUMNS), (ROWS, COLUMNS),
                                           check_invariants=False)

        def reduce_rows(gradient: torch.Tensor = gradient) -> None:
            rows.collect(gradient, 1.0)
            rows.agree(dense=False)
            target.zero_()
            rows.reduce(target, scale=1.0, accumulate=False).wait()

        publishing = _Publishing(rows, mine, touched[touched < len(mine)], full)
        bytes = rows.table.row_bytes(torch.float32) * len(touched) / 2
        found[density] = (_seconds(reduce_rows, rounds) / bytes / whole[0],
                          _seconds(publishing.publish, rounds, publishing.change) / bytes / whole[1])
    return found


class _Publishing:
    """Publications of some rows, however many they are."""

    def __init__(self, rows: RowExchange, mine: torch.Tensor, touched: torch.Tensor, full: torch.Tensor) -> None:
        self._rows, self._mine, self._touched, self._full = rows, mine, touched, full
        self._before = mine.clone()

    def change(self) -> None:
        self._before.copy_(self._mine)
        self._mine[self._touched] += 1

    def publish(self) -> None:
        rows = self._rows
        changed = changed_rows(self._mine, self._before)
        counts = rows._counted(changed)
        self._before.index_copy_(0, changed, self._mine[changed])
        rows._spread(self._full, changed, counts, rows._labels["publish rows"]).wait()


def _seconds(action: Callable[[], None], rounds: int, before: Callable[[], None] = lambda: None) -> float:
    """Return the seconds of the median of some runs, after one that is not counted."""
    found: list[float] = []
    for _ in range(2 * rounds + 1):
        before()
        dist.barrier()
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


if __name__ == "__main__":
    main()
