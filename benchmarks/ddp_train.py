"""Train examples/gpt under DDP in one of the ways of ddp_hooks.py: the same model, samples, schedule and clipping.

    torchrun --nproc-per-node 2 benchmarks/ddp_train.py --hook powersgd-1 --shoal-config examples/gpt/zero1.json --out FOLDER

Options are those of examples/gpt/train.py, except that there are no checkpoints. It leaves curve.csv and quality.json as
that does. Optimizers are torch's, with the options of the configuration, whose schedule the learning rate follows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_hooks import BY_NAME, ONE_BUCKET
from machine import ROOT
from torch.nn.parallel import DistributedDataParallel

from shoal.config.load import read
from shoal.data import Loader, RepeatingLoader
from shoal.schedule import WarmupCosineLR

sys.path.append(str(ROOT / "examples" / "gpt"))
from corpus import Blocks, prepare
from curve import History
from evaluate import bits_per_byte
from model import PRESETS


def main() -> None:
    args = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config: dict[str, Any] = read(args.shoal_config)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    corpus = prepare(args.cache)
    torch.manual_seed(args.seed)
    model = PRESETS[args.model].build()
    loader = Loader(Blocks(corpus.train.path, args.block), batch_size=config["train_batch_size"] // ranks, rank=rank,
                    ranks=ranks)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=ONE_BUCKET)
    way, params = BY_NAME[args.hook], config["optimizer"]["params"]
    way.hook(args.steps)(wrapped)
    optimizer = way.optimizer(args.steps)(wrapped.parameters(), **{**params, "betas": tuple(params["betas"])})
    schedule = WarmupCosineLR(optimizer, **{**config["scheduler"]["params"], "total_num_steps": args.steps})
    history = History(args.out / "curve.csv", until=0)
    for step, (x, y) in zip(range(1, args.steps + 1), RepeatingLoader(loader), strict=False):
        loss = wrapped(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        history.add(step, mean.item() / ranks / math.log(2))
        if rank == 0 and step % max(1, args.steps // 40) == 0:
            sys.stdout.write(f"step {step}/{args.steps}  loss {mean.item() / ranks:.4f}\n")
            sys.stdout.flush()
    model.eval()
    overlapping = Blocks(corpus.validation.path, args.block, stride=args.block // 2)
    bits = bits_per_byte(model, overlapping, torch.device("cpu"))
    if rank == 0:
        history.save()
        (args.out / "quality.json").write_text(json.dumps({"step": args.steps, "bits_per_byte": bits}) + "\n")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads still hold futures of a Python hook, and abort a process whose interpreter has ended


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", choices=tuple(BY_NAME), default="none",
                        help="how gradients travel, and the optimizer (none)")
    parser.add_argument("--shoal-config", type=Path, required=True, help="the configuration whose training this is")
    parser.add_argument("--model", choices=PRESETS, default="3m", help="size of the model (3m)")
    parser.add_argument("--steps", type=int, required=True, help="steps in all")
    parser.add_argument("--block", type=int, default=256, help="bytes that the model sees at once (256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (0)")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is made")
    parser.add_argument("--cache", type=Path, default=Path("out/corpus"), help="folder of the corpus (out/corpus)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
