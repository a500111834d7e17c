"""The memory of a unit's weights: the whole buffer, and the part of it that rests on this rank.

    full     the whole buffer in the compute dtype, whose views the parameters are; without memory while it is shrunk
    rest     the part that rests: all of it, or this rank's shard

Shrinking keeps the memory while a tensor of code outside shares it, and lets what that code may have written rest first.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from shoal.device import follow, stream_of_thread
from shoal.tier import Elastic, ResidentSpan, Span, Store, Transfer, elastic, storage_use_count, zeros
from shoal.zero.layout import Layout

__all__ = ["WeightMemory"]


class WeightMemory:
    """Memory of `layout`, of which `part` rests in `store`. It starts grown, and holds zeros.

    It can shrink if the unit `reshards` its weights after their use, or if they rest in another tier than the compute
    `device`.
    """

    def __init__(self, layout: Layout, part: range, dtype: torch.dtype, device: torch.device, store: Store, name: str, *,
                 reshards: bool):
        self.is_offloaded: Final = store.granule is not None or store.device != device
        """Whether the weights rest in another tier than the compute device's memory."""
        self.can_shrink: Final = reshards or self.is_offloaded
        self._elastic: Elastic | None = None
        self._external_refs: int | None = None  # users of the storage when code outside was first given it
        self._is_dirty = False
        self._snapshots: list[tuple[Tensor, Tensor]] = []
        if self.can_shrink:
            self._elastic = elastic(layout.size, dtype, part, device, store, name, layout.names)
            self.full, self.rest = self._elastic.full, self._elastic.shard
        else:
            self.full = zeros(layout.size, dtype, device)
            self.rest: Span = ResidentSpan(self.full)
        self._arrived_in: torch.Stream | None = None
        """The stream that waited for the weights; None until they first move: the script waits for what it built."""
        self.rests_in_full: Final = self._elastic is None or self._elastic.shard_in_full
        """Whether the resting shard is a part of `full`, so that writes to `full` reach it."""
        self.own: Final = None if self._elastic is None else self._elastic.own
        """The resting shard, where a gather over ranks is to read it there; None: it is in `full` once that has grown."""

    @property
    def is_exposed(self) -> bool:
        """Whether code outside may share the memory for longer than it is gathered."""
        return self._external_refs is not None

    def is_shared(self, *, views: int) -> bool:
        """Whether another tensor shares the memory, apart from parameters, `views` of which have other memory by now."""
        return self._external_refs is not None and storage_use_count(self.full) > self._external_refs - views

    def grow(self) -> Transfer:
        """Allocate the full buffer; when the transfer is done, it holds the resting shard, unless `own` does."""
        assert self._elastic is not None
        return self._elastic.grow()

    def arrive(self) -> None:
        """Note that the current stream has waited for the weights, and uses them."""
        self._arrived_in = stream_of_thread(self.full.device)
        if self._elastic is not None:
            self._elastic.use()

    def use(self) -> None:
        """Have the current stream use the weights after they have arrived in another one, and before they are freed."""
        if stream_of_thread(self.full.device) != self._arrived_in:
            follow(self._arrived_in, self.full)

    def shrink(self) -> None:
        """Free the full buffer, except the shard."""
        assert self._elastic is not None
        self._elastic.use()  # this stream may have waited for a copy that none has used, and saves below
        if self._is_dirty:
            self.save()
            self._is_dirty = False
        if self._external_refs is not None and storage_use_count(self.full) <= self._external_refs:
            self._external_refs = None
        self._elastic.shrink(retain=self._external_refs is not None)

    def save(self) -> None:
        """Copy this rank's shard of the full buffer into the resting shard."""
        if self._elastic is not None:
            self._elastic.save_shard()

    def load(self) -> None:
        """Copy the resting shard into its place in the full buffer."""
        if self._elastic is not None:
            self._elastic.load_shard()

    def mark_dirty(self) -> None:
        """Note that code outside may have written whole weights: `shrink` saves them."""
        self._is_dirty = self.can_shrink

    def expose(self) -> None:
        """Let code outside have the grown memory: a tensor that then shares it keeps it."""
        if self._external_refs is None and self.can_shrink:
            self._external_refs = storage_use_count(self.full)

    def take_snapshot(self, memory: Tensor) -> Tensor:
        """Copy the values of `memory`; `update_snapshots` changes the copy too, until `restore` writes it back."""
        values = memory.detach().clone()
        self._snapshots.append((memory, values))
        return values

    @torch.no_grad()
    def restore(self, values: Tensor) -> None:
        """Write back the copy that `take_snapshot` returned."""
        memory = next(memory for memory, saved in self._snapshots if saved is values)
        self._snapshots = [pair for pair in self._snapshots if pair[1] is not values]
        memory.copy_(values)

    def update_snapshots(self) -> None:
        """Have the snapshots contain the present values: a step or an edit is not to be undone."""
        for memory, values in self._snapshots:
            values.copy_(memory)
