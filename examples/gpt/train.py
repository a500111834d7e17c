"""Train a GPT on the standard library's own sources: any number of ranks, any ZeRO stage, an unchanged model.

    shoal run --ranks 2 examples/gpt/train.py --shoal-config examples/gpt/zero2.json

`train` is the loop, `main` what leads to it; `report.py` says what came of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import shoal
from corpus import Blocks, prepare
from curve import History
from display import Display
from meter import Meter
from model import PRESETS
from report import Report
from shoal.config.load import read
from shoal.data import RepeatingLoader
from shoal.errors import CheckpointError
from watch import Watch

WARM_UPS = ("freeze_step", "var_freeze_step", "var_update_scaler", "local_step_scaler")
"""Steps by which an optimizer begins to compress, or compresses more: a share of them all."""


def train(engine: shoal.Engine, batches: Iterator[tuple[Tensor, Tensor]], watch: Watch) -> None:
    """Step through `batches` until `watch` says that it is enough."""
    while not watch.ended:
        x, y = next(batches)
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        watch.note(loss)


def main() -> None:
    args = parser().parse_args()
    args.out = args.out or Path(f"out/gpt-{args.model}")
    shoal.init_distributed()
    config, steps = configuration(args)
    corpus = prepare(args.cache)
    torch.manual_seed(args.seed)
    model = PRESETS[args.model].build()
    engine, _, loader, _ = shoal.initialize(model=model, training_data=Blocks(corpus.train.path, args.block), config=config)
    if args.resume:
        resume(engine, args.out)

    console = Console(quiet=engine.global_rank != 0)
    report = Report(engine, corpus, args, parser(), console)
    report.begin()
    meter = Meter(engine, steps=steps, tokens=engine.train_batch_size() * args.block, flops=model.flops(args.block))
    history = History(args.out / "curve.csv", until=engine.global_steps)
    with Watch(meter, Display(console, every=max(1, steps // 40)), history, args.out / "checkpoints",
               args.save_every) as watch:
        train(engine, iter(RepeatingLoader(loader)), watch)
        watch.save()
    engine.wait_for_checkpoint()
    report.stopped() if watch.stopped else report.finished(history)


def parser() -> argparse.ArgumentParser:
    """Declare the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="3m", help="size of the model (default 3m)")
    parser.add_argument("--steps", type=int, help="steps in all (default: total_num_steps of the config's schedule)")
    parser.add_argument("--block", type=int, default=256, help="bytes that the model sees at once (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--save-every", type=int, default=500, metavar="N", help="steps between checkpoints (default 500)")
    parser.add_argument("--out", type=Path, help="folder for what is made (default out/gpt-MODEL)")
    parser.add_argument("--cache", type=Path, default=Path("out/corpus"), help="folder of the corpus (default out/corpus)")
    shoal.add_config_arguments(parser)
    return parser


def configuration(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Return what the JSON file says, its schedule and warm-ups of the optimizer stretched to `--steps`, and the steps."""
    config: dict[str, Any] = read(args.shoal_config)
    schedule, optimizer = config["scheduler"]["params"], config["optimizer"]["params"]
    before, steps = schedule["total_num_steps"], args.steps or schedule["total_num_steps"]
    schedule["total_num_steps"] = steps
    for key in WARM_UPS:
        if key in optimizer:
            optimizer[key] = max(1, optimizer[key] * steps // before)
    return config, steps


def resume(engine: shoal.Engine, out: Path) -> None:
    """Take up training where the last checkpoint in `out` left it: weights, optimizer, schedule, place in the data."""
    path, _ = engine.load_checkpoint(out / "checkpoints")
    if path is None:
        raise CheckpointError(f"--resume: no checkpoint in {out / 'checkpoints'}; leave --resume out to start anew")


if __name__ == "__main__":
    main()
