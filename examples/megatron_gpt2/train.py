"""Train a GPT-2 of tensor-parallel layers, in the form of published Megatron scripts.

    shoal run --ranks 4 examples/megatron_gpt2/train.py --model-parallel-size 2 \\
        --deepspeed_config examples/megatron_gpt2/gpt2.json

The script assigns the ranks (`mpu.py`) and creates model, optimizer and schedule; the JSON file has the other settings.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

import mpu
import shoal as deepspeed
from gpt2 import GPT2, Shape

sys.path.append(str(Path(__file__).parents[1] / "gpt"))  # the text is that of examples/gpt

from corpus import Blocks, prepare
from display import size

WARMUP = 10
"""Steps over which the learning rate rises."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-parallel-size", type=int, default=1, help="ranks of one model (default 1)")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--train-iters", type=int, default=100)
    parser.add_argument("--eval-iters", type=int, default=8)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--save", type=Path, help="folder for the checkpoint at the end")
    parser.add_argument("--load", type=Path, help="folder of a checkpoint to begin with, of any number of model ranks")
    parser.add_argument("--cache", type=Path, default=Path("out/corpus"), help="folder of the corpus (default out/corpus)")
    return deepspeed.add_config_arguments(parser).parse_args()


def get_model(args: argparse.Namespace) -> GPT2:
    torch.manual_seed(args.seed)
    return GPT2(Shape(layers=args.num_layers, dim=args.hidden_size, heads=args.num_attention_heads,
                      positions=args.seq_length))


def get_optimizer(model: nn.Module, args: argparse.Namespace) -> AdamW:
    """Decay matrices, and neither biases nor norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return AdamW([{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}],
                 lr=args.lr, betas=(0.9, 0.95))


def get_lr_scheduler(optimizer: AdamW, args: argparse.Namespace) -> LambdaLR:
    """Rise, then fall as a cosine to a tenth."""
    def factor(step: int) -> float:
        done = min(1.0, step / max(1, args.train_iters))
        return min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def batches(path: Path, args: argparse.Namespace, size: int, *, shuffle: bool) -> Iterator[list[Tensor]]:
    """Yield (x, y) of this data rank, which all ranks of its model share, again and again."""
    blocks = Blocks(path, args.seq_length)
    sampler = DistributedSampler(blocks, num_replicas=mpu.get_data_parallel_world_size(), rank=mpu.get_data_parallel_rank(),
                                 shuffle=shuffle, seed=args.seed)
    while True:
        yield from DataLoader(blocks, batch_size=size, sampler=sampler, drop_last=True)


def print_rank_0(words: str) -> None:
    if dist.get_rank() == 0:
        print(words, flush=True)


def mean(losses: list[Tensor]) -> float:
    """Return the mean over microbatches and data ranks."""
    total = torch.stack(losses).mean()
    dist.all_reduce(total, group=mpu.get_data_parallel_group())
    return total.item() / mpu.get_data_parallel_world_size()


def train(engine: deepspeed.Engine, data: Iterator[list[Tensor]], args: argparse.Namespace) -> None:
    losses: list[Tensor] = []
    while engine.global_steps < args.train_iters:
        x, y = (side.to(engine.device) for side in next(data))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        step = engine.global_steps
        if engine.micro_steps % engine.gradient_accumulation_steps() == 0 and step % args.log_interval == 0:
            norm = engine.get_global_grad_norm()
            print_rank_0(f"iteration {step}/{args.train_iters} | lm loss {mean(losses):.4f} | lr {engine.get_lr()[0]:.1e} | "
                         f"grad norm {norm or 0.0:.3f}")
            losses.clear()


@torch.no_grad()
def evaluate(engine: deepspeed.Engine, data: Iterator[list[Tensor]], args: argparse.Namespace) -> float:
    engine.eval()
    found = [engine(*(side.to(engine.device) for side in next(data))) for _ in range(args.eval_iters)]
    engine.train()
    return mean(found)


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    mpu.initialize_model_parallel(args.model_parallel_size)
    model = get_model(args)
    optimizer = get_optimizer(model, args)
    lr_scheduler = get_lr_scheduler(optimizer, args)
    engine, optimizer, _, lr_scheduler = deepspeed.initialize(args=args, model=model, optimizer=optimizer,
                                                              lr_scheduler=lr_scheduler, mpu=mpu)
    if args.load is not None:
        engine.load_checkpoint(args.load)
    corpus, batch = prepare(args.cache), engine.train_micro_batch_size_per_gpu()
    print_rank_0(f"{mpu.get_data_parallel_world_size()} data x {mpu.get_model_parallel_world_size()} model ranks, ZeRO "
                 f"stage {engine.zero_optimization_stage()}")
    train(engine, batches(corpus.train.path, args, batch, shuffle=True), args)
    loss = evaluate(engine, batches(corpus.validation.path, args, batch, shuffle=False), args)
    print_rank_0(f"validation | lm loss {loss:.4f} | {loss / math.log(2):.3f} bits per byte")
    if args.save is not None:
        engine.save_checkpoint(args.save)
        engine.wait_for_checkpoint()
    held = [f"model rank {mpu.get_model_parallel_rank()} | data rank {mpu.get_data_parallel_rank()} | "
            f"{sum(parameter.numel() for parameter in engine.module.parameters()):,} parameters | "
            f"{size(engine.model_state_bytes().total)} of model state"] * dist.get_world_size()
    dist.all_gather_object(held, held[0])
    for rank, words in enumerate(held):
        print_rank_0(f"rank {rank} | {words}")


if __name__ == "__main__":
    main()
