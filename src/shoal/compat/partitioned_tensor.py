"""A tensor that is cut into one slice for each rank of a group, and gathered on demand; published for pipelines."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shoal.comm
from shoal.errors import UsageError

__all__ = ["PartitionedTensor"]


class PartitionedTensor:
    """This rank's slice of a tensor that every rank of `group` has. `full` gathers it again, which is collective."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup | None, partition_meta: Tensor | None = None):
        self.group = group
        self.num_parts = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.orig_size: list[int] = list(tensor.size())
        self.orig_device = tensor.device
        self.local_data, self.partition = self._partition_tensor(tensor)
        self.even_split = tensor.numel() % self.num_parts == 0

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: dist.ProcessGroup | None,
                  device: Any = "cpu") -> PartitionedTensor:
        """Return the tensor that `to_meta` described, of which `local_part` is this rank's slice.

        Raises `UsageError` if the description is of another group.
        """
        values: list[int] = meta.tolist()
        dims = values[0]
        made = cls.__new__(cls)
        made.group, made.num_parts, made.rank = group, dist.get_world_size(group), dist.get_rank(group)
        made.orig_size = values[1:1 + dims]
        made.orig_device = torch.device(device)
        parts, rank = values[1 + dims:3 + dims]
        if (parts, rank) != (made.num_parts, made.rank):
            raise UsageError(f"PartitionedTensor.from_meta: got the slice of rank {rank} of {parts}; this is rank "
                             f"{made.rank} of {made.num_parts}")
        made.partition = values[3 + dims:]
        made.local_data = local_part
        made.even_split = made.partition[-1] % made.num_parts == 0
        return made

    def _partition_tensor(self, tensor: Tensor) -> tuple[Tensor, list[int]]:
        size, rest = divmod(tensor.numel(), self.num_parts)
        bounds = [part * size + min(part, rest) for part in range(self.num_parts + 1)]
        return tensor.detach().reshape(-1)[bounds[self.rank]:bounds[self.rank + 1]].clone(), bounds

    def full(self, device: Any = None) -> Tensor:
        """Gather the whole tensor on `device`, by default where it was."""
        place = torch.device(self.orig_device if device is None else device)
        lengths = [after - before for before, after in zip(self.partition, self.partition[1:], strict=False)]
        longest = max(lengths)
        mine = torch.zeros(longest, dtype=self.local_data.dtype, device=place)
        mine[:self.local_data.numel()].copy_(self.local_data.reshape(-1))
        whole = torch.empty(longest * self.num_parts, dtype=mine.dtype, device=place)
        shoal.comm.all_gather_into_tensor(whole, mine, group=self.group)
        rows = whole.view(self.num_parts, longest)
        return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)]).view(self.orig_size)

    def move(self, device: Any) -> None:
        """Let this rank's slice rest on `device`."""
        self.local_data = self.local_data.to(device)

    def to_meta(self) -> Tensor:
        """Return a tensor of integers that describes the partition: dims, shape, ranks, rank, bounds."""
        return torch.tensor([len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition],
                            dtype=torch.long, device=self.orig_device)

    def data(self) -> Tensor:
        """Return this rank's slice."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Return the shape of this rank's slice."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self.orig_size
