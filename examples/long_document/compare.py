"""Dense attention at the longest that fits a given memory, beside sparse attention ten times longer, on the same text.

    python examples/long_document/compare.py --memory 1G

Each reader is trained by `train.py` in a process of its own, one after the other; what they make is in `--out`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console

import structure
from distances import Memory, Result, picture, table, text_picture
from reader import SHAPES, eager_bytes

HERE = Path(__file__).parent
UNITS = {"M": 1 << 20, "G": 1 << 30}
TIMES = 10
QUICK = ("--steps", "2", "--files", "2")


def size(text: str) -> int:
    """Read a size such as 900M or 1G."""
    found = re.fullmatch(r"(\d+)([MG])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"got {text!r}; give a size such as 900M or 1G")
    return int(found[1]) * UNITS[found[2]]


def longest(memory: int, model: str) -> int:
    """Return the most bytes that matrices of scores let a dense reader take at once: a multiple of the block."""
    of_one = eager_bytes(1, SHAPES[model])
    return max(1, math.isqrt(memory // of_one) // structure.BLOCK) * structure.BLOCK


def run(name: str, *words: str) -> str:
    """Run a script of this folder and return what it printed; a training shows it as it comes."""
    shown = name == "train.py"
    done = subprocess.run([sys.executable, str(HERE / name), *words], stdout=None if shown else subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"long_document: {name} ended with status {done.returncode}")
    return done.stdout or ""


def measured(model: str, length: int, *words: str) -> Memory:
    """Measure one training pass in a process of its own."""
    grown, seconds = run("memory.py", "--model", model, "--length", str(length), *words).split()
    return Memory(bytes=int(grown), seconds=float(seconds))


def main() -> None:
    options = arguments()
    console = Console()
    dense = longest(options.memory, options.model)
    whole = dense * TIMES
    console.print(f"dense attention: {dense:,} bytes of text fit {options.memory / UNITS['M']:,.0f} MiB as matrices of "
                  f"scores; {whole:,} would take {eager_bytes(whole, SHAPES[options.model]) / UNITS['G']:,.1f} GiB\n",
                  highlight=False, soft_wrap=True)
    results: list[Result] = []
    for way, length, words in (("dense", dense, ()), ("sparse", whole, ("--sparse",))):
        memory = measured(options.model, length, *words)
        run("train.py", "--way", way, "--dense", str(dense), "--times", str(TIMES), "--model", options.model, "--seed",
            str(options.seed), "--out", str(options.out), *(QUICK if options.quick else ("--steps", str(options.steps))))
        results.append(Result.of(way, length, memory, json.loads((options.out / f"{way}.json").read_text())))
    files = [options.out / f"distance.{kind}" for kind in ("svg", "png")]
    picture(files, results)
    console.print()
    console.print(table(results))
    console.print(text_picture(results))
    console.print(f"\nbits per byte by distance: {files[0]}, {files[1]}", highlight=False, soft_wrap=True)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=size, default=size("940M"), help="what matrices of scores may take (default 940M)")
    parser.add_argument("--model", choices=SHAPES, default="small", help="size of the model (default small)")
    parser.add_argument("--steps", type=int, default=200, help="samples to train on, one a step (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, and of the order of files (default 0)")
    parser.add_argument("--quick", action="store_true", help="two steps of a tiny model, to try it")
    parser.add_argument("--out", type=Path, default=Path("out/long_document"),
                        help="folder for what is made (default out/long_document)")
    options = parser.parse_args()
    if options.quick:
        options.model, options.memory = "tiny", size("4M")
    return options


if __name__ == "__main__":
    main()
