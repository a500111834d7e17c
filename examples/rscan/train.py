"""Learn which docstring belongs to which function: any number of ranks, what travels chosen by the JSON file alone.

    shoal run --ranks 2 examples/rscan/train.py --shoal-config examples/rscan/dense.json

`train` is the loop, `main` what leads to it; `compare.py` runs several of these and lays them side by side.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import shoal
from data import Corpus, Pairs, prepare
from judge import Judge
from live import Live
from record import Point, Record
from shoal.config.load import read
from shoal.data import RepeatingLoader
from shoal.errors import CheckpointError
from shoal.transport.collectives import traffic
from towers import TwoTowers, matching_loss


class Run:
    """Steps an engine through `batches` to step `steps`, evaluates every `every` steps and keeps the record.

    A checkpoint goes to `checkpoints` every `save_every` steps and at the end, or only where it is stopped if that is None.
    """

    def __init__(self, engine: shoal.Engine, batches: Iterator[tuple[Tensor, Tensor]], judge: Judge, record: Record, *,
                 steps: int, every: int, checkpoints: Path, save_every: int | None) -> None:
        self.engine = engine
        self.batches = batches
        self.judge = judge
        self.record = record
        self.steps = steps
        self.every = every
        self.checkpoints = checkpoints
        self.save_every = save_every
        self.asked = self.stopped = False

    def train(self, live: Live) -> None:
        """Train to the end, or to the evaluation after a rank was asked to stop."""
        if not self.record.points:
            self._evaluate(0.0, float("nan"))
            live.show(self.record.points[-1], self.engine)
        seconds, sent = self.record.points[-1].seconds, traffic.bytes_sent
        begun = self.engine.global_steps
        while not self.ended:
            start = time.perf_counter()
            loss = self._step()
            seconds += time.perf_counter() - start
            self.record.bytes_per_step = (traffic.bytes_sent - sent) / (self.engine.global_steps - begun)
            if self.engine.global_steps % self.every == 0 or self.engine.global_steps == self.steps:
                self._evaluate(seconds, loss)
                live.show(self.record.points[-1], self.engine)
            else:
                live.step(self.engine.global_steps)
            if self.stopped or (self.save_every and (self.ended or self.engine.global_steps % self.save_every == 0)):
                self._save()

    @property
    def ended(self) -> bool:
        return self.stopped or self.engine.global_steps >= self.steps

    def _step(self) -> float:
        """Take a step and return this rank's mean loss."""
        losses: list[Tensor] = []
        for _ in range(self.engine.gradient_accumulation_steps()):
            queries, passages = next(self.batches)
            loss = matching_loss(*self.engine(queries.to(self.engine.device), passages.to(self.engine.device)))
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    def _evaluate(self, seconds: float, loss: float) -> None:
        engine = self.engine
        facts = torch.tensor([float(self.asked), loss / engine.world_size], device=engine.device)
        dist.all_reduce(facts)
        asked, loss = facts.tolist()
        self.stopped = asked > 0
        self.record.points.append(Point(step=engine.global_steps, samples=engine.global_samples, seconds=seconds,
                                        auc=self.judge(engine), loss=loss))

    def _save(self) -> None:
        self.engine.save_checkpoint(self.checkpoints, client_state={"points": [asdict(at) for at in self.record.points]})

    def remember(self, number: int, frame: FrameType | None) -> None:
        """Heed a signal at the next evaluation, where all ranks learn of it."""
        self.asked = True


def main() -> None:
    args = parser().parse_args()
    shoal.init_distributed()
    config: dict[str, Any] = read(args.shoal_config)
    steps = stretch(config, args.steps)
    corpus = prepare(args.cache, args.library)
    learned = corpus.train[:args.pairs]
    Random(args.seed).shuffle(learned)
    torch.manual_seed(args.seed)
    model = TwoTowers(rows=args.rows, sparse=config.get("sparse_gradients", False))
    engine, _, loader, _ = shoal.initialize(model=model, training_data=Pairs(learned, args.rows), config=config)
    torch.manual_seed(args.seed + engine.global_rank)  # ranks forget different words
    args.name = args.name or ("1 rank" if engine.world_size == 1 else f"{engine.world_size} ranks")
    record = Record(system=args.name, ranks=engine.world_size, seed=args.seed, rate=args.rate)
    if args.resume:
        record.points = resume(engine, args.out)

    console = Console(quiet=engine.global_rank != 0)
    say(console, engine, corpus, args)
    judge = Judge(Pairs(corpus.held_out, args.rows))
    run = Run(engine, iter(RepeatingLoader(loader)), judge, record, steps=steps, every=args.every,
              checkpoints=args.out / "checkpoints", save_every=args.save_every)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, run.remember)
    with Live(console, steps) as live:
        run.train(live)
    if engine.global_rank == 0:
        record.save(args.out / "record.json")
    engine.wait_for_checkpoint()
    if run.stopped:
        console.print(f"step {engine.global_steps} of {steps} is saved in {args.out / 'checkpoints'}; go on with --resume",
                      highlight=False)


def parser() -> argparse.ArgumentParser:
    """Declare the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="what the run is called (default: by its ranks)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the table of words (default 200,000)")
    parser.add_argument("--steps", type=int, help="steps in all (default: those of the config's cycle and its decay)")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="steps between evaluations (default 10)")
    parser.add_argument("--pairs", type=int, help="learn from so many functions only (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order (default 0)")
    parser.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints (default: only if stopped)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, on any number of ranks")
    parser.add_argument("--rate", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("out/rscan/run"), help="folder for what is made (out/rscan/run)")
    parser.add_argument("--cache", type=Path, default=Path("out/rscan"), help="folder of the pairs (default out/rscan)")
    parser.add_argument("--library", type=Path, help="folder of the sources (default: this Python's standard library)")
    shoal.add_config_arguments(parser)
    return parser


def stretch(config: dict[str, Any], steps: int | None) -> int:
    """Stretch what the configuration counts in steps to `steps` in all, and return those; None: leave it as it is.

    The cycle's two sides and one decay after them are the whole of the training.
    """
    schedule, optimizer = config["scheduler"]["params"], config["optimizer"]["params"]
    parts = ("cycle_first_step_size", "cycle_second_step_size", "decay_step_size")
    whole = sum(schedule[part] for part in parts)
    for section, key in ((schedule, parts[0]), (schedule, parts[1]), (schedule, parts[2]), (optimizer, "freeze_step")):
        if steps and key in section:
            section[key] = max(1, round(section[key] * steps / whole))
    return steps or whole


def resume(engine: shoal.Engine, out: Path) -> list[Point]:
    """Take up training where the checkpoint in `out` left it, and return the evaluations until there."""
    path, state = engine.load_checkpoint(out / "checkpoints")
    if path is None or state is None:
        raise CheckpointError(f"--resume: no checkpoint in {out / 'checkpoints'}; leave --resume out to start anew")
    return [Point(**point) for point in state["points"]]


def say(console: Console, engine: shoal.Engine, corpus: Corpus, args: argparse.Namespace) -> None:
    """Say what is about to be trained."""
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    modules = len({pair.module for pair in corpus.held_out})
    console.print(f"[bold]{args.name}, seed {args.seed}[/]: {parameters / 1e6:.1f} M parameters, "
                  f"{engine.train_batch_size()} of {len(corpus.train[:args.pairs]):,} functions a step; judged by "
                  f"{len(corpus.held_out)} of {modules} other modules", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
