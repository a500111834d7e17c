"""Train a GPT whose model state is four times the memory cap of the process: the state is on disk.

    python examples/bigger_than_memory/train.py --cap 512M

The process restarts itself under the cap, so that all of its memory counts (`cap.py`), and runs `training.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cap import die_with_parent, parse, run_capped

sys.path.append(str(Path(__file__).parents[1] / "gpt"))  # the model and the text are those of examples/gpt

MODELS = ("tiny", "3m", "30m", "124m")
PATH = Path("out/bigger_than_memory")
DEFAULTS = {"cap": parse("512M"), "steps": 10, "block": 64}
TINY = {"cap": parse("448M"), "steps": 2, "block": 32}
"""A cap just above the memory of torch, activations and buffers in the smallest such run."""


def main() -> int:
    args = arguments()
    if args.path == PATH:
        PATH.mkdir(parents=True, exist_ok=True)
    if args.under is None:
        return run_capped(args.cap, [sys.executable, *sys.argv, "--under"])
    die_with_parent()
    from session import session  # imports torch, which must happen under the cap

    return session(args)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=size, metavar="SIZE", help="memory of the process: 512M, 1.5G, 512MiB (default 512M)")
    size_of_model = parser.add_mutually_exclusive_group()
    size_of_model.add_argument("--times", type=float, default=4.0, help="model state, in caps of all ranks (default 4)")
    size_of_model.add_argument("--model", choices=MODELS, help="a model of examples/gpt instead")
    parser.add_argument("--steps", type=int, help="steps to train (default 10)")
    parser.add_argument("--block", type=int, help="bytes of text a step and rank (default 64)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of weights and gradients")
    parser.add_argument("--path", type=Path, default=PATH, metavar="FOLDER", help=f"folder of swap files (default {PATH})")
    parser.add_argument("--out", type=Path, default=PATH, metavar="FOLDER", help=f"folder of step.png (default {PATH})")
    parser.add_argument("--tiny", action="store_true", help="a quick run: a cap of 448M, 2 steps, 32 bytes of text")
    proof = parser.add_mutually_exclusive_group()
    proof.add_argument("--proof", action="store_true", help="only run the proof, on a larger model")
    proof.add_argument("--no-proof", action="store_true", help="train without the proof")
    parser.add_argument("--under", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, value in (TINY if args.tiny else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("steps", "block", "times"):
        if getattr(args, name) <= 0:
            parser.error(f"argument --{name}: got {getattr(args, name)}; give a number above 0")
    return args


def size(text: str) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
