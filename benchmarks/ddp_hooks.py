"""The communication hooks of DDP that torch offers, each with its own settings: what plain torch does for a slow link.

PowerSGD sends two factors of a low rank in place of each matrix, with error feedback. Its stock hook starts a second
collective from the completion of the first. On gloo it fails with several buckets, whose collectives then meet in different
orders on different ranks. So it gets one bucket of the whole model (`ONE_BUCKET`), or `waiting`: each bucket is done when
its hook returns.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

ONE_BUCKET = 1 << 14
"""MB: more than any model here has."""
START = 2
"""Steps of PowerSGD that send whole gradients: the fewest that its error feedback allows."""

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


def power_sgd(rank: int, *, start: int = START, waiting: bool = False) -> Callable[[DistributedDataParallel], None]:
    """Return what registers torch's PowerSGD of that `rank`, which sends whole gradients in the first `start` steps."""
    def register(wrapped: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
        wrapped.register_comm_hook(state, _waiting if waiting else powerSGD_hook.powerSGD_hook)

    return register


def _waiting(state: powerSGD_hook.PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Reduce a bucket by PowerSGD, and return when that is done. DDP compares these annotations with its own."""
    done = powerSGD_hook.powerSGD_hook(state, bucket)
    done.wait()
    return done


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


BY_NAME: dict[str, Callable[[int], Callable[[DistributedDataParallel], None] | None]] = {
    "none": lambda steps: None,
    "fp16": lambda steps: fp16(),
    "bf16": lambda steps: bf16(),
    "powersgd-1": lambda steps: power_sgd(1),
    "powersgd-4": lambda steps: power_sgd(4),
    "powersgd-1-late": lambda steps: power_sgd(1, start=late(steps)),
    "powersgd-4-late": lambda steps: power_sgd(4, start=late(steps)),
}
"""By name: the hook of a training of so many steps. A *late* one sends whole gradients in the warm-up of 1-bit Adam."""
LATE = 0.15


def late(steps: int) -> int:
    """Return the steps before a late PowerSGD begins, of so many."""
    return max(2, round(LATE * steps))
