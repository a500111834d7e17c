"""Evaluate the model: bits per byte on held-out files, and a generated sample.

Every rank makes the same number of forward calls of the same shape: where weights are spread over ranks, each call is a
collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from corpus import Blocks

Forward = Callable[[Tensor], Tensor]
"""Bytes (batch, length) in, logits (batch, length, 256) out: an engine, or a plain model."""


@torch.no_grad()
def bits_per_byte(forward: Forward, blocks: Blocks, device: torch.device, tokens: int = 4096) -> float:
    """Return the mean cost in bits of a byte of `blocks`, shared out over the ranks, about `tokens` bytes at a time.

    Where blocks overlap, a byte is counted in the block that shows the most of what stands before it.
    """
    ranks, rank, batch = dist.get_world_size(), dist.get_rank(), max(1, tokens // blocks.block)
    total = torch.zeros(2, dtype=torch.float64, device=device)  # nats, bytes
    for start in range(0, len(blocks), ranks * batch):
        mine = torch.arange(start + rank * batch, start + (rank + 1) * batch)
        pairs = [blocks[min(int(index), len(blocks) - 1)] for index in mine]
        x, y = (torch.stack(side).to(device) for side in zip(*pairs, strict=True))
        nats = F.cross_entropy(forward(x).float().transpose(1, 2), y, reduction="none")
        counted = (mine < len(blocks))[:, None].expand(-1, blocks.block).clone()
        counted[mine > 0, :-blocks.stride] = False
        total[0] += nats[counted.to(device)].sum()
        total[1] += counted.sum()
    dist.all_reduce(total)
    nats, count = total.tolist()
    return nats / count / math.log(2)


@torch.no_grad()
def generate(forward: Forward, prompt: bytes, length: int, *, window: int, device: torch.device,
             temperature: float = 0.7, seed: int = 0) -> Iterator[int]:
    """Yield `length` bytes that the model writes after `prompt`, each chosen from its last `window` bytes.

    Every rank draws the same bytes from the same seed.
    """
    source = torch.Generator().manual_seed(seed)
    written = list(prompt)
    for _ in range(length):
        logits = forward(torch.tensor([written[-window:]], device=device))[0, -1].float().cpu()
        written.append(int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=source)))
        yield written[-1]
