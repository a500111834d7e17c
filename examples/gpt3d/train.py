"""Train the GPT of `examples/gpt` with pipeline, tensor and data parallelism; the JSON file sets the mesh.

    shoal run --ranks 8 examples/gpt3d/train.py --shoal-config examples/gpt3d/3d.json

`layers.py` holds what the model needs for that, `build` what the script needs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import shoal

sys.path.append(str(Path(__file__).parents[1] / "gpt"))  # the model, the text and the display are those of examples/gpt

from corpus import Blocks, prepare
from curve import History
from display import Display
from layers import begin, cross_entropy, layers, plan
from meter import Meter
from model import PRESETS, Shape
from shoal.config.load import read
from shoal.engine.pipeline_engine import PipelineEngine
from shoal.errors import CheckpointError
from shoal.tensor_parallel import parallelize
from summary import Summary
from watch import Watch

STAGES_PER_RANK = {"interleaved": 2, "zbv": 2}
"""Stages per rank of the schedules that need several."""


def build(shape: Shape, config: dict[str, Any], seed: int, data: Blocks) -> PipelineEngine:
    """Build this rank's stages on the mesh of the configuration, cut their layers over the tensor ranks, make the engine."""
    mesh = shoal.configured_mesh(config)
    schedule = config.get("pipeline", {}).get("schedule", "1f1b")
    model = shoal.PipelineModule(layers(shape), num_stages=mesh.size("pipeline"), loss_fn=cross_entropy, schedule=schedule,
                                 stages_per_rank=STAGES_PER_RANK.get(schedule, 1))
    begin(model, shape, seed)
    parallelize(model, mesh.group("tensor"), plan(shape), stages=mesh.group("pipeline"))
    engine, *_ = shoal.initialize(model=model, config=config, mpu=mesh, training_data=data)
    assert isinstance(engine, PipelineEngine)
    return engine


def train(engine: PipelineEngine, watch: Watch) -> None:
    """Train until `watch` ends the run."""
    while not watch.ended:
        watch.note(engine.train_batch())


def main() -> None:
    args = arguments()
    shoal.init_distributed()
    config, shape = configuration(args), PRESETS[args.model]
    steps = config["scheduler"]["params"]["total_num_steps"]
    corpus = prepare(args.cache)
    engine = build(shape, config, args.seed, Blocks(corpus.train.path, args.block))
    if args.resume and engine.load_checkpoint(args.out / "checkpoints")[0] is None:
        raise CheckpointError(f"--resume: no checkpoint in {args.out / 'checkpoints'}; leave --resume out to start anew")

    console = Console(quiet=engine.global_rank != 0)
    summary = Summary(engine, corpus.validation, args.block, console)
    summary.begin(args.model)
    with torch.device("meta"):
        flops = shape.build().flops(args.block)
    meter = Meter(engine, steps=steps, tokens=engine.train_batch_size() * args.block, flops=flops)
    history = History(args.out / "curve.csv", until=engine.global_steps)
    with Watch(meter, Display(console, every=max(1, steps // 40)), history, args.out / "checkpoints",
               args.save_every) as watch:
        train(engine, watch)
        watch.save()
    engine.wait_for_checkpoint()
    summary.finished(history, args.out)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="3m", help="size of the model (default 3m)")
    parser.add_argument("--steps", type=int, help="steps in all (default: total_num_steps of the config's schedule)")
    parser.add_argument("--block", type=int, default=256, help="bytes that the model sees at once (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --out, of any mesh")
    parser.add_argument("--save-every", type=int, default=500, metavar="N", help="steps between checkpoints (default 500)")
    parser.add_argument("--out", type=Path, help="folder for outputs (default out/gpt-MODEL, as of examples/gpt)")
    parser.add_argument("--cache", type=Path, default=Path("out/corpus"), help="folder of the corpus (default out/corpus)")
    shoal.add_config_arguments(parser)
    args = parser.parse_args()
    args.out = args.out or Path(f"out/gpt-{args.model}")
    return args


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON configuration, with its learning-rate schedule stretched to `--steps`."""
    config: dict[str, Any] = read(args.shoal_config)
    schedule = config["scheduler"]["params"]
    schedule["total_num_steps"] = args.steps or schedule["total_num_steps"]
    return config


if __name__ == "__main__":
    main()
