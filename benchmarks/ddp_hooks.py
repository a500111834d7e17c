"""The ways in which plain torch trains over a slow link: communication hooks of DDP, and weights averaged now and then.

PowerSGD sends two factors of a low rank in place of each matrix, with error feedback. Its stock hook starts a second
collective from the completion of the first. On gloo it fails with several buckets, whose collectives then meet in different
orders on different ranks. So it gets one bucket of the whole model (`ONE_BUCKET`), or is `ordered`: a thread reduces one
bucket after the other, which overlaps with backward.

Left out, since they fail on gloo and the CPU in torch 2.13: `batched_powerSGD_hook` (its own assertion on the shape of a
matrix) and both `quantization_hooks` (they expect what NCCL's all_gather returns).
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

ONE_BUCKET = 1 << 14
"""MB: more than any model here has."""
START = 2
"""Steps of PowerSGD that send whole gradients: the fewest that its error feedback allows."""
PERIOD = 4
"""Steps after which post-local SGD averages the weights."""

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]  documented as public


def fp16() -> Callable[[DistributedDataParallel], None]:
    """Return what registers torch's hook that sends and sums gradients in fp16."""
    return lambda wrapped: wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)


def bf16() -> Callable[[DistributedDataParallel], None]:
    """Return what registers a hook that sends and sums gradients in bf16, as torch's own does, which refuses gloo."""
    return lambda wrapped: wrapped.register_comm_hook(None, _bf16)


def _bf16(state: object, bucket: GradBucket) -> Future[Tensor]:
    """Sum a bucket in bf16. DDP compares these annotations with its own."""
    narrow = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(narrow, async_op=True)
    assert work is not None

    def widened(future: Future[list[Tensor]]) -> Tensor:
        return bucket.buffer().copy_(future.value()[0])

    return work.get_future().then(widened)


def power_sgd(rank: int, *, start: int = START, ordered: bool = False) -> Callable[[DistributedDataParallel], None]:
    """Return what registers torch's PowerSGD of that `rank`, which sends whole gradients in the first `start` steps."""
    def register(wrapped: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
        if ordered:
            wrapped.register_comm_hook(Ordered(state=state, thread=ThreadPoolExecutor(1)), _ordered)
        else:
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """PowerSGD of several buckets, and the thread that reduces them one after the other, as every rank does."""

    state: powerSGD_hook.PowerSGDState
    thread: ThreadPoolExecutor


def _ordered(both: Ordered, bucket: GradBucket) -> Future[Tensor]:
    """Let the thread reduce a bucket after those before it. DDP compares these annotations with its own."""
    done = Future[Tensor]()

    def reduce() -> None:
        try:
            done.set_result(powerSGD_hook.powerSGD_hook(both.state, bucket).wait())
        except RuntimeError as error:
            done.set_exception(error)

    both.thread.submit(reduce)
    return done


def local(start: int) -> Callable[[DistributedDataParallel], None]:
    """Return what registers torch's hook of post-local SGD: after `start` steps gradients stay on their rank."""
    def register(wrapped: DistributedDataParallel) -> None:
        alone, _ = dist.new_subgroups(group_size=1)
        state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=start)
        wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)

    return register


def adamw(weights: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Return AdamW in its fused form."""
    return torch.optim.AdamW(weights, fused=True, **options)


def nadam(weights: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Return AdamW with Nesterov's look-ahead: NAdam with decoupled decay, and a schedule of momentum that is b1 at once."""
    return torch.optim.NAdam(weights, decoupled_weight_decay=True, momentum_decay=1e6, **options)


def averaged(start: int) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes AdamW whose weights are averaged over ranks in every `PERIOD`th step, after `start`."""
    def make(weights: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        from torch.distributed.optim import PostLocalSGDOptimizer  # here alone: its package warns while it is imported

        return PostLocalSGDOptimizer(adamw(weights, **options), PeriodicModelAverager(period=PERIOD, warmup_steps=start))

    return make


def power_sgd_elements(shapes: list[torch.Size], rank: int) -> int:
    """Return the elements that PowerSGD sends for parameters of these shapes: P (n, r) and Q (m, r), or the tensor itself.

    The stock hook views a tensor as a matrix of its first dimension, and leaves it whole where the factors, times its
    `min_compression_rate` of 2, are no fewer elements (torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook).
    """
    sent = 0
    for shape in shapes:
        rows, columns = shape[0], shape.numel() // shape[0]
        least = min(rows, columns, rank)
        compressed = len(shape) > 1 and (rows + columns) * least * 2 < rows * columns
        sent += (rows + columns) * least if compressed else shape.numel()
    return sent


LATE = 0.15
"""Of the steps: a long warm-up, for the sake of quality."""


def late(steps: int) -> int:
    """Return how many of so many steps are the first `LATE`."""
    return max(2, round(LATE * steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How DDP trains in so many steps: what registers its hook, and what makes its optimizer."""

    hook: Callable[[int], Callable[[DistributedDataParallel], None]] = lambda steps: lambda wrapped: None
    optimizer: Callable[[int], Callable[..., torch.optim.Optimizer]] = lambda steps: adamw


BY_NAME = {
    "none": Way(),
    "fp16": Way(hook=lambda steps: fp16()),
    "bf16": Way(hook=lambda steps: bf16()),
    "powersgd-1": Way(hook=lambda steps: power_sgd(1)),
    "powersgd-4": Way(hook=lambda steps: power_sgd(4)),
    "powersgd-1-late": Way(hook=lambda steps: power_sgd(1, start=late(steps))),
    "powersgd-4-late": Way(hook=lambda steps: power_sgd(4, start=late(steps))),
    "local": Way(hook=lambda steps: local(late(steps)), optimizer=lambda steps: averaged(late(steps))),
    "none-nadam": Way(optimizer=lambda steps: nadam),
    "powersgd-4-nadam": Way(hook=lambda steps: power_sgd(4), optimizer=lambda steps: nadam),
    "powersgd-4-late-nadam": Way(hook=lambda steps: power_sgd(4, start=late(steps)), optimizer=lambda steps: nadam),
}
"""By name. *none* is DDP as it is, the baseline of the others. A *late* one sends whole gradients in the first `LATE`
of the steps, as *local* does, which then averages weights. 1-bit Adam has a look-ahead, so that *nadam* has one too."""
