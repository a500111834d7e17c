"""Figures of a sweep: samples per second, speed over the baseline, and bytes beside the formula."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from catalogue import BASELINE, BY_SYSTEM, SYSTEMS
from ddp_hooks import power_sgd_elements
from interleave import PARAMETER, PROCESS, Plan
from machine import available
from rate_curves import Point
from sweep import Found
from workloads import parameters, shapes, workload

from shoal.onebit import packed_bytes

GRAIN = 16  # a rank's span of the model is a multiple of so many elements


def sent(name: str, plan: Plan) -> float:
    """Return the bytes that the busiest host must send in a step of a system, by its formula.

    Data parallel: `ratio` x 2 Psi (N-1)/N in fp32. One that compresses, in place of it: 2 (N-1) p(Psi / N), p(n) being the
    signs and scales of n elements (docs/compression.md), here of the model as one unit. PowerSGD: the elements of its
    factors in place of Psi. Averaged weights: Psi in one step of a period. A pipeline: what lies between two
    blocks, for all sequences, once forward and its gradient once backward; the first and the last host send one of the two.
    """
    system, ranks = SYSTEMS[name], plan.ranks
    if system.whole:
        task = workload(plan.workload, microbatch=plan.microbatch, length=plan.length)
        return float(min(2, ranks - 1) * ranks * task.link_bytes)
    if name in BY_SYSTEM:
        span = -(-parameters(plan.workload) // (ranks * GRAIN)) * GRAIN
        return system.ratio * 2 * (ranks - 1) * packed_bytes(span)
    elements = parameters(plan.workload)
    if system.rank:
        elements = power_sgd_elements(shapes(plan.workload), system.rank)
    return system.ratio * 4 * elements * 2 * (ranks - 1) / ranks


def curve(found: Found, name: str, plan: Plan, rates: Sequence[str]) -> list[Point]:
    """Return the samples a second of a system by rate; none where it failed."""
    points: list[Point] = []
    for rate in rates:
        if cell := found.cell(name, rate):
            speeds = [plan.ranks * plan.microbatch / statistics.median(seconds) for seconds in cell.seconds]
            points.append(Point(rate=rate, middle=statistics.median(speeds), low=min(speeds), high=max(speeds)))
    return points


def round_times(found: Found, name: str, rate: str, *, warm_up: float = 0.0, over: str = BASELINE) -> list[float]:
    """Return the speed of a system at a rate relative to the system `over`, DDP, in each round.

    `warm_up` is the share of a training that it sends as the system of its warm-up does.
    """
    mine, baseline = found.cell(name, rate), found.cell(over, rate)
    warming = found.cell(SYSTEMS[name].warm_up, rate) if warm_up else mine
    assert mine and baseline and warming
    ratios: list[float] = []
    for turns in zip(mine.seconds, warming.seconds, baseline.seconds, strict=True):
        ours, before, theirs = map(statistics.median, turns)
        ratios.append(theirs / (warm_up * before + (1 - warm_up) * ours))
    return ratios


def interface(found: Found, name: str) -> float:
    """Return the bytes of a step of a system on the busiest interface: the median over turns, at whatever rate."""
    return statistics.median(bytes for cell in found.cells if cell.system == name for bytes in cell.sent)


def check_memory(systems: Sequence[str], plan: Plan) -> None:
    """End the program where the systems do not fit the memory together."""
    if len(systems) > (most := _fit(plan)):
        sys.exit(f"memory: {len(systems)} systems are to be there at once, and room is for about {most}; choose fewer with "
                 "--systems")


def groups(systems: Sequence[str], most: int) -> list[list[str]]:
    """Cut the systems into groups of at most `most` where that can be: each with DDP, and the warm-up of those in it."""
    lead = [name for name in systems if name == BASELINE]
    found = [list(lead)]
    for name in systems:
        needed = [each for each in (SYSTEMS[name].warm_up, name) if each in systems and each not in lead]
        if len({*found[-1], *needed}) > most and found[-1] != lead:
            found.append(list(lead))
        found[-1] += [each for each in needed if each not in found[-1]]
    return found


def fitting(systems: Sequence[str], plan: Plan) -> list[list[str]]:
    """Return groups of systems of which each fits the memory; ends the program where one does not."""
    found = groups(systems, _fit(plan))
    check_memory(max(found, key=len), plan)
    return found


def _fit(plan: Plan) -> int:
    """Return the number of systems that fit the memory that is available now."""
    return available() // (plan.ranks * (PROCESS + PARAMETER * parameters(plan.workload)))
