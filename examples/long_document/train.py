"""Train one reader, dense or sparse, on samples of the standard library, and judge it on files that it has not read.

    python examples/long_document/train.py --way sparse

`compare.py` runs both. A sparse reader takes a sample whole; a dense one takes it in pieces of `--dense` bytes, all in one
step. Dense attention is computed as the layout of ones, which gives what matrices of scores give, in less time and memory.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import shoal
import structure
from documents import Samples, names_of, read_library
from line import Live, Reading
from reader import SHAPES, Reader
from shoal.attention import Blocks
from shoal.config.load import read
from tally import Score, Tally
from ways import Way, bits_of, pieces

HERE = Path(__file__).parent


def train(engine: shoal.Engine, samples: Samples, way: Way, live: Live) -> list[float]:
    """Take one step for each sample; return its loss in bits per byte."""
    losses: list[float] = []
    began = time.perf_counter()
    for sample in samples:
        parts = [_step(engine, piece[None], way.blocks(piece)) for piece in pieces(sample, way)]
        losses.append(float(torch.stack(parts).mean()) / math.log(2))
        live.show(Reading(step=len(losses), steps=len(samples), bits=losses[-1], learning_rate=engine.get_lr()[0],
                          read=len(losses) * samples.length, seconds=time.perf_counter() - began))
    return losses


def _step(engine: shoal.Engine, text: Tensor, blocks: Blocks) -> Tensor:
    loss = engine(text, blocks).mean()
    engine.backward(loss)
    engine.step()
    return loss.detach()


@torch.no_grad()
def judge(engine: shoal.Engine, files: list[bytes], known: set[bytes], way: Way, live: Live) -> Score:
    """Return the bits of files that were held out, by position and by the distance of names."""
    engine.eval()
    tally = Tally(known, near=way.dense)
    for number, content in enumerate(files, start=1):
        text = content[:way.dense * way.times]
        tally.add(text, bits_of(engine, text, way))
        live.say(f"{way.name}: judged on {number} of {len(files)} files that it has not read")
    return tally.score()


def main() -> None:
    args = arguments()
    config: dict[str, Any] = read(args.shoal_config or HERE / "reader.json")
    schedule = config["scheduler"]["params"]
    schedule["warmup_num_steps"] = max(1, schedule["warmup_num_steps"] * args.steps // schedule["total_num_steps"])
    schedule["total_num_steps"] = args.steps
    config["gradient_accumulation_steps"] = args.times if args.way == "dense" else 1
    way = Way(name=args.way, dense=args.dense, times=args.times, heads=SHAPES[args.model].heads)
    library = read_library(args.library)
    samples = Samples(library.train, args.dense * args.times, args.steps, args.seed)
    torch.manual_seed(args.seed)
    engine, *_ = shoal.initialize(model=Reader(SHAPES[args.model]), config=config)
    with Live(Console(), args.way, every=max(1, args.steps // 20)) as live:
        began = time.process_time()
        losses = train(engine, samples, way, live)
        seconds = time.process_time() - began
        score = judge(engine, library.held_out[:args.files], names_of(library.train), way, live)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.way}.json").write_text(json.dumps(
        {"losses": losses, "seconds": seconds, "dense": args.dense, "times": args.times, **score.facts()}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("dense", "sparse"), required=True)
    parser.add_argument("--model", choices=SHAPES, default="small", help="size of the model (default small)")
    parser.add_argument("--dense", type=int, default=3200, help="bytes that a dense reader takes at once (default 3200)")
    parser.add_argument("--times", type=int, default=10, help="a sample is so many times that (default 10)")
    parser.add_argument("--steps", type=int, default=200, help="samples to train on, one a step (default 200)")
    parser.add_argument("--files", type=int, help="files to be judged on (default: all that are held out)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, and of the order of files (default 0)")
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_path("stdlib")),
                        help="folder of Python sources (default: the standard library of this interpreter)")
    parser.add_argument("--out", type=Path, default=Path("out/long_document"), help="folder for what is made")
    shoal.add_config_arguments(parser)
    args = parser.parse_args()
    if args.dense % structure.BLOCK:
        parser.error(f"--dense: got {args.dense}; give a multiple of {structure.BLOCK}")
    return args


if __name__ == "__main__":
    main()
