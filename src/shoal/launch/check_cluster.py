"""`shoal check-cluster` examines the hosts of a job as `shoal run` would start them, and says what is wrong with each.

A host that does not start, or has other versions, is a fault like others: the rest are examined all the same. Shown are
versions, cores, memory, free /dev/shm and disk, the clock beside this one, and the rate from each host to the next.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from shoal.config.sizes import format_bytes
from shoal.errors import LaunchError, UsageError
from shoal.launch import facts, selection
from shoal.launch.cluster import Cluster, Node
from shoal.launch.console import counted
from shoal.launch.orphans import exit_on_signals
from shoal.launch.protocol import AskTime, Down, Listen, Listening, Measure, Measured, Message, Signal, Time

__all__ = ["add_arguments", "main"]

ASKED = 5
"""Questions for the time; the one with the fastest answer counts."""
ANSWER = 30.0
"""Seconds that a host has to answer."""
MOST_SECONDS = 10.0
"""Seconds that the measurement of a link may take."""


T = TypeVar("T", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examined:
    """Measurements of a host."""

    offset: float
    """Its clock minus this one, in seconds."""
    rate: float | None
    """Bytes a second to the next host that runs; None where there is no other."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal check-cluster`."""
    selection.add_arguments(parser)
    parser.add_argument("--nodes", type=int, metavar="N", help="the first N hosts (default: all)")
    parser.add_argument("--ranks", type=int, metavar="N", help="slots of each host; with Slurm and no hostfile")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each link (default 0.5)")


def main(args: argparse.Namespace) -> int:
    """Examine the hosts; return 0 if nothing is wrong, else 1."""
    if not selection.asks_for_hosts(args):
        raise UsageError("name the hosts: --hostfile FILE, --hosts LIST, or --launcher slurm")
    for option, value in (("--nodes", args.nodes), ("--ranks", args.ranks)):
        if value is not None and value < 1:
            raise UsageError(f"{option}: got {value}; choose 1 or more")
    if not 0 < args.seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds: got {args.seconds:g}; choose more than 0, up to {MOST_SECONDS:g}")
    exit_on_signals()
    nodes = None if args.nodes is None else (args.nodes, args.nodes)
    chosen = selection.select(args, nodes=nodes, ranks=args.ranks, variables={})
    here, wrong = facts.gather(os.getcwd()), list[str]()
    with chosen.cluster(None) as cluster, cluster:
        found: dict[int, _Examined] = {}
        running = [node for node in cluster.nodes if not node.lost]
        for number, node in enumerate(running):
            try:
                found[number] = _examine(cluster, node, running[(number + 1) % len(running)], args.seconds)
            except LaunchError as error:
                wrong.append(str(error))
        cluster.send(Signal(number=signal.SIGTERM))
        wrong += [f"{node.name}: {node.lost}" for node in cluster.nodes if node.lost]
    _show([(node, found.get(running.index(node)) if node in running else None) for node in cluster.nodes])
    for number, node in enumerate(running):
        if node.facts is not None:
            examined = found.get(number, _Examined(offset=node.offset, rate=None))
            wrong += facts.disagreements(node.name, node.facts, here)
            wrong += facts.faults(node.name, node.facts, offset=examined.offset)
            if examined.rate == 0:
                wrong.append(f"{node.name}: {running[(number + 1) % len(running)].name} cannot be reached from it; let the "
                             "hosts connect to each other")
    wrong = list(dict.fromkeys(wrong))
    for fault in wrong:
        print(fault)
    print(f"{counted(len(cluster.nodes), 'host')} can run a job" if not wrong else counted(len(wrong), "fault"))
    return int(bool(wrong))


def _examine(cluster: Cluster, node: Node, other: Node, seconds: float) -> _Examined:
    """Measure a host, and its link to the `other`. Raises `LaunchError` where one of the two does not answer."""
    answers: list[tuple[float, float]] = []
    for _ in range(ASKED):
        start = time.time()
        answer = _ask(cluster, node, AskTime(), Time)
        end = time.time()
        answers.append((end - start, answer.now - (start + end) / 2))
    rate = None
    if other is not node:
        where = _ask(cluster, other, Listen(), Listening)
        rate = _ask(cluster, node, Measure(port=where.port, addresses=where.addresses, seconds=seconds), Measured).rate
    return _Examined(offset=min(answers)[1], rate=rate)


def _ask(cluster: Cluster, node: Node, question: Down, kind: type[T]) -> T:
    """Return a host's answer of this kind. Raises `LaunchError` where none comes."""
    cluster.send(question, [node])
    deadline = time.monotonic() + ANSWER
    while time.monotonic() < deadline and not node.has_ended:
        if (came := cluster.receive()) is not None and came[0] is node and isinstance(came[1], kind):
            return came[1]
    raise LaunchError(f"{node.name}: {node.lost or f'no answer within {ANSWER:g} s; is it overloaded?'}")


def _show(rows: Sequence[tuple[Node, _Examined | None]]) -> None:
    """Print a row for each host; what is not known of one stays empty."""
    table = Table("host", "Python", "torch", "Shoal", "cores", "memory", "/dev/shm free", "disk free", "clock",
                  "to the next")
    for node, examined in rows:
        has = node.facts
        table.add_row(node.name, *([] if has is None else [
            has.python, has.torch, has.shoal, str(has.cores),
            *map(format_bytes, (has.memory, has.shared_memory, has.disk)),
            "" if examined is None else f"{examined.offset * 1000:+.1f} ms",
            "" if examined is None or examined.rate is None else f"{format_bytes(examined.rate)}/s"]))
    Console(width=140).print(table)
