"""Attention over a sequence that ranks split: bytes sent beside the formula, loss and gradients beside those of one rank.

    python benchmarks/sequence.py [--length 8192] [--ranks 2 4]

fp32, one sample, 8 heads of 64. The layout is a window of 3 blocks of 64 and one global block; "dense" visits all blocks.
The loss is the mean of squares of the output. No time is measured: all ranks are on this machine.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from progress import progress
from results import Outcome, Sheet, Target
from torch import Tensor

from attention import DIM, HEADS, operands, window
from shoal.attention import Blocks, attend
from shoal.recording import traffic
from shoal.sequence_parallel import SequenceAxis, attend_sequence, block_plan, heads_plan
from shoal.testing import run_ranks

BLOCK, FP32 = 64, 4
ROUNDING = 1e-5
"""By how much of the largest value a result may differ: sums of thousands of fp32 products in another order."""

Exchange = Literal["heads", "blocks"]
WAYS: tuple[tuple[str, Exchange], ...] = (("dense", "heads"), ("window", "heads"), ("window", "blocks"))


def layout(name: str, length: int) -> Blocks:
    """Return the blocks of a layout of WAYS."""
    blocks = length // BLOCK
    return Blocks.dense(length, length, BLOCK) if name == "dense" else Blocks.of(window(blocks), BLOCK)


def whole(name: str, length: int) -> list[Tensor]:
    """Return the loss of one rank, and its gradients of query, key and value."""
    *leaves, _ = operands(length)
    loss = attend(*leaves, layout(name, length)).square().mean()
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has of a pass: its part of the results, the bytes that it sent, and those of the formula."""

    results: list[Tensor]
    sent: tuple[int, int]
    formula: tuple[int, int]


def split(length: int) -> list[Part]:
    """Return this rank's part of each way of WAYS."""
    axis = SequenceAxis(dist.group.WORLD)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found: list[Part] = []
    for name, exchange in WAYS:
        leaves = [each.detach()[:, :, axis.part(length)].clone().requires_grad_() for each in operands(length)[:3]]
        blocks = layout(name, length)
        before = traffic.bytes_sent
        output = attend_sequence(*leaves, axis, blocks, exchange=exchange)
        forward = traffic.bytes_sent - before
        loss = output.square().sum() / (HEADS * length * DIM)  # the ranks' losses add up to the mean
        loss.backward()
        backward = traffic.bytes_sent - before - forward
        plan = (block_plan(blocks, HEADS, HEADS, rank, ranks).sent_bytes(1, DIM, DIM, FP32) if exchange == "blocks" else
                heads_plan(HEADS, HEADS, rank, ranks).sent_bytes(1, length // ranks, DIM, DIM, FP32))
        found.append(Part([loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)],
                          (forward, backward), (plan.forward, plan.backward)))
    return found


def furthest(parts: list[Part], expected: list[Tensor]) -> tuple[float, float]:
    """Return by how much loss and gradients differ at most, as a share of the largest value."""
    loss = abs(sum(part.results[0].item() for part in parts) / expected[0].item() - 1)
    gradients = 0.0
    for index, gradient in enumerate(expected[1:], 1):
        joined = torch.cat([part.results[index] for part in parts], dim=2)
        gradients = max(gradients, ((joined - gradient).abs().max() / gradient.abs().max()).item())
    return loss, gradients


def main() -> None:
    options = _options()
    rows: list[tuple[str, ...]] = []
    targets: list[Target] = []
    with progress() as tell:
        expected = {name: whole(name, options.length) for name, _ in WAYS}
        for ranks in options.ranks:
            tell(f"{ranks} ranks")
            by_rank = run_ranks(ranks, split, options.length)
            for number, (name, exchange) in enumerate(WAYS):
                parts = [parts[number] for parts in by_rank]
                loss, gradients = furthest(parts, expected[name])
                sent = [sum(part.sent[way] for part in parts) for way in (0, 1)]
                formula = [sum(part.formula[way] for part in parts) for way in (0, 1)]
                title = f"{ranks} ranks, {name}, {exchange} exchanged"
                rows.append((title, *(f"{each:,}" for pair in zip(sent, formula, strict=True) for each in pair),
                             f"{loss:.1e}", f"{gradients:.1e}"))
                inexact = sum(part.sent != part.formula for part in parts)
                targets += [Target(what=f"{title}: ranks whose bytes are not the formula's", measured=inexact, high=0),
                            Target(what=f"{title}: gradients beside one rank's, share of the largest", measured=gradients,
                                   high=ROUNDING),
                            Target(what=f"{title}: loss beside one rank's, share", measured=loss, high=ROUNDING)]
    sheet = Sheet(title="A split sequence", columns=(
        "way", "bytes sent forward", "formula", "bytes sent backward", "formula", "loss differs by", "gradients differ by"),
        rows=tuple(rows))
    note = f"{options.length:,} tokens, fp32, one sample, {HEADS} heads of {DIM}; bytes of all ranks together."
    Outcome(benchmark="sequence", command=" ".join(["python", *sys.argv]), note=note, raw={}, sheets=(sheet,),
            targets=tuple(targets)).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="tokens, a multiple of 64 times the ranks (8192)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks of the sequence axis (2 4)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/sequence.json)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
