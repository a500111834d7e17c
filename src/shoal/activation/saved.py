"""Saved tensors rest in a store until backward: one copy of each storage, fetched one module ahead.

    pack      autograd saves a tensor: its storage is copied into a span of the store, unless an earlier save did so; of a
              storage whose parts count versions apart, the part alone (`_Source`)
    fetch     the first tensor of a module that backward unpacks starts the fetch of the module's storages, and of those of
              the module before it
    restore   the view is made again over the fetched copy, with the strides that it had

Of the inputs of recomputed blocks, which all tensor ranks hold alike, each rank can keep one slice (`Slices`).
The original is freed with its last user in forward. A copy counts as the tensor that was saved: autograd's rule for tensors
that are written to after they are saved holds (`version_witness`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.activation.budget import Budget
from shoal.errors import UsageError
from shoal.recording.call import Handle
from shoal.tier import Disk, Store, Transfer, mirrored
from shoal.tier.span import DONE, PlacedSpan
from shoal.transport.collectives import Communicator, Label
from shoal.tree import tensors_within

__all__ = ["SMALL", "RestingView", "SavedActivations", "SliceGather", "Slices", "version_witness"]

SMALL = 1 << 16
"""Bytes below which a storage stays: to move it costs more than its memory."""


class _ModuleGroup:
    """The storages that were first saved in a row within one module, in one pass."""

    def __init__(self, module: object, before: _ModuleGroup | None):
        self.module = module
        self._before = before
        self._members: list[ref[_RestingStorage]] = []

    def add(self, resting: _RestingStorage) -> None:
        self._members.append(ref(resting))

    def fetch_ahead(self) -> None:
        """Start the fetches of this group and of the one before it, which backward needs next."""
        self._fetch()
        before, self._before = self._before, None  # once, and no chain of groups stays alive
        if before is not None:
            before._fetch()

    def _fetch(self) -> None:
        members, self._members = self._members, []
        for member in reversed(members):
            resting = member()
            if resting is not None:
                resting.fetch()


class _Spans:
    """Spans of a store as the compute device uses them, kept for the next storage of about their size.

    Lengths of inputs change from step to step. A span that is too small for what comes now makes room for the new one.
    """

    def __init__(self, store: Store, device: torch.device):
        self._store = store
        self._device = device
        self._free: dict[int, list[PlacedSpan]] = {}
        self._closed = False

    def take(self, size: int) -> PlacedSpan:
        """Return a span that no one uses, of at least `size` bytes and at most half as many again."""
        fits = [each for each in self._free if size <= each <= 1.5 * size]
        if fits:
            return self._pop(min(fits))
        small = [each for each in self._free if each < size <= 2 * each]
        if small:
            self._close(self._pop(max(small)))
        return mirrored(self._device, self._store, size, torch.uint8, f"saved activations of {size:,} bytes")[0]

    def _pop(self, size: int) -> PlacedSpan:
        free = self._free[size]
        span = free.pop()
        if not free:
            del self._free[size]
        return span

    def give(self, span: PlacedSpan) -> None:
        """Keep a span for the next use."""
        if self._closed:
            self._close(span)
        else:
            self._free.setdefault(span.tensor.numel(), []).append(span)

    def close(self) -> None:
        """Return all memory and the bytes on disk, those of spans in use once they are given back."""
        self._closed = True
        for span in [span for free in self._free.values() for span in free]:
            self._close(span)
        self._free.clear()

    def _close(self, span: PlacedSpan) -> None:
        span.close()
        if isinstance(self._store, Disk) and self._store.swap.disk_bytes == 0:
            self._store.swap.close()


class SliceGather:
    """An all-gather of slices; `wait` may be called again."""

    def __init__(self, full: Tensor, handle: Handle):
        self.full = full
        self._handle = handle
        self.done = False

    def wait(self) -> Tensor:
        """Return the bytes of all ranks."""
        if not self.done:
            self.done = True
            self._handle.wait()
        return self.full


class Slices:
    """Bytes that all ranks of a communicator hold alike rest as one equal slice on each; the last is padded."""

    def __init__(self, communicator: Communicator, modules: Iterable[nn.Module]):
        """The inputs of `modules` are sliced. Ranks make their slices in the same order."""
        self._communicator = communicator
        self._label = Label(kind="gather", unit="saved activations", index=communicator.register())
        self._modules: WeakSet[Any] = WeakSet(modules)
        self._compared: WeakSet[Any] = WeakSet()
        self._last: SliceGather | None = None

    def __contains__(self, module: object) -> bool:
        return module in self._modules

    def own(self, source: Tensor, module: Any) -> Tensor:
        """Return this rank's slice. Raises `UsageError` where the ranks' first inputs of a module differ."""
        if module not in self._compared:
            self._compared.add(module)
            self.compare(source, type(module).__name__)
        return self.slice_of(source)

    def slice_of(self, source: Tensor) -> Tensor:
        """Return this rank's slice of bytes that all ranks have alike."""
        size = -(-source.numel() // self._communicator.ranks)
        part = source[self._communicator.rank * size:(self._communicator.rank + 1) * size]
        return part if part.numel() == size else torch.cat([part, part.new_zeros(size - part.numel())])

    def compare(self, source: Tensor, kind: str) -> None:
        """Raise `UsageError` on every rank where the ranks have other bytes than each other; a collective call."""
        sums = self._communicator.gather_objects(zlib.crc32(source.cpu().numpy().data))
        if len(set(sums)) > 1:
            raise UsageError(f"activation_checkpointing.partition_activations: got true; rank {self._communicator.rank}: "
                             f"the tensor ranks give different inputs to a {kind}, so that no rank can keep a slice for the "
                             f"others (with sequence parallelism they are slices already). Set it to false")

    @property
    def is_gathering(self) -> bool:
        """Whether an all-gather is in flight: one is at a time, in the order of the ranks' backward passes."""
        return self._last is not None and not self._last.done

    def gather(self, own: Tensor) -> SliceGather:
        """Start the all-gather of the slices, after the one that is in flight."""
        if self._last is not None:
            self._last.wait()
        full = own.new_empty(own.numel() * self._communicator.ranks)
        self._last = SliceGather(full, self._communicator.all_gather(full, self._label, own))
        return self._last


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The contents of one copy, at one version: a storage, or the elements of a tensor that is a part of one.

    Views share the counter of versions of their base. Tensors from `unsafe_chunk` and `unsafe_split`, as `nn.GRU` and
    `nn.LSTMCell` have them, share a storage alone: the version of one says nothing of writes to the others.
    """

    storage: StorageWeakRef
    """Keeps the identity of the storage from being used again while the copy can be found by it."""
    version: int
    bytes: int
    size: torch.Size | None = None
    """None: the whole storage."""
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.uint8

    @classmethod
    def of(cls, tensor: Tensor) -> _Source:
        base, storage = tensor if tensor._base is None else tensor._base, tensor.untyped_storage()
        size = torch.Size(length if step else 1 for length, step in zip(base.shape, base.stride(), strict=True))
        offset = int(base.storage_offset())
        stop = offset + 1 + sum((length - 1) * step for length, step in zip(size, base.stride(), strict=True))
        whole = cls(storage=StorageWeakRef(storage), version=tensor._version, bytes=storage.nbytes())
        if base.numel() == 0 or (offset == 0 and stop * base.element_size() >= storage.nbytes()):
            return whole
        return replace(whole, bytes=size.numel() * base.element_size(), size=size, stride=base.stride(), offset=offset,
                       dtype=base.dtype)

    def read(self, tensor: Tensor) -> Tensor:
        """Return the bytes, side by side; `tensor` has the storage."""
        storage: Any = tensor.untyped_storage()
        found = torch.empty(0, dtype=self.dtype, device=tensor.device)
        if self.size is None:
            return found.set_(storage)
        return found.set_(storage, self.offset, self.size, self.stride).reshape(-1).view(torch.uint8)

    def spread(self, found: Tensor) -> Tensor:
        """Return the bytes with the strides that they had in the storage, from the first of the part on."""
        if self.size is None:
            return found
        spread = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=found.device)
        spread.copy_(found.view(self.dtype).view(self.size))
        storage: Any = spread.untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=found.device).set_(storage)

    def offset_of(self, tensor: Tensor) -> int:
        """Return where a view begins in what `spread` returns."""
        return int(tensor.storage_offset()) - self.offset * self.dtype.itemsize // tensor.element_size()


class _RestingStorage:
    """The copy of a storage, from its save until the last node that saved a view of it has run or is freed."""

    def __init__(self, spans: _Spans, span: PlacedSpan, source: _Source, own: Tensor, slices: Slices | None):
        """Copy `own` to `span`, which is taken from `spans` and given back: what `source` reads, or this rank's slice."""
        self.source = source
        self.bytes = own.numel()
        """Bytes that rest."""
        self._slices = slices
        self._gathering: SliceGather | None = None
        self._spans = spans
        self._span = span
        self._arriving: Transfer | None = None
        self._restored: Tensor | None = None
        self._span.fetch(fresh=True).wait()
        self._resting.copy_(own)
        self._span.commit()

    @property
    def _resting(self) -> Tensor:
        return self._span.tensor[:self.bytes]

    def fetch(self) -> None:
        """Start bringing the copy back."""
        if self._arriving is None and self._restored is None:
            self._arriving = self._span.fetch()
            if self._slices is not None and self._arriving is DONE and not self._slices.is_gathering:
                self._gathering = self._slices.gather(self._resting)

    def restored(self, group: _ModuleGroup) -> Tensor:
        """Return the bytes of the storage on the compute device; `group` is of the module whose backward asks for them.

        They stay as long as this copy: several nodes may have saved views of it.
        """
        self.fetch()
        if self._slices is None:
            group.fetch_ahead()
        if self._restored is None:
            arriving, self._arriving = self._arriving or DONE, None
            arriving.wait()
            self._restored = self.source.spread(self._gathered())
            self._span.commit(changed=False)
        group.fetch_ahead()  # of slices now: one all-gather is in flight at a time
        return self._restored

    def _gathered(self) -> Tensor:
        """Return what the source read, in memory of its own, the slices of other ranks too."""
        if self._slices is None:
            return self._resting.clone()
        gathering, self._gathering = self._gathering or self._slices.gather(self._resting), None
        return gathering.wait()[:self.source.bytes]

    def __del__(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
        if self._arriving is not None:
            self._arriving.wait()
            self._span.commit(changed=False)
        self._spans.give(self._span)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RestingView:
    """A tensor whose storage rests."""

    storage: _RestingStorage
    group: _ModuleGroup
    """The module that saved the view: another one may have saved the storage first."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def restore(self) -> Tensor:
        """Return the tensor, as it was when it was saved. Raises `TierError` where a disk fails."""
        with torch.no_grad():
            return self.storage.restored(self.group).view(self.dtype).as_strided(self.size, self.stride, self.offset)


class SavedActivations:
    """The saved tensors of a model's passes, which rest in `store`; bytes are counted over all passes."""

    def __init__(self, store: Store, device: torch.device, *, slices: Slices | None = None, budget: Budget | None = None,
                 smallest: int = SMALL):
        """The inputs of the modules of `slices` rest as slices; where `store` is memory of `device`, all else stays.

        Storages of fewer than `smallest` bytes stay on `device`. The `budget` is shown all saved tensors.
        """
        self.rested_bytes = 0
        """Bytes of storages that rest, or of their slices, so far."""
        self._device = device
        self._moves_all = store.device != device or isinstance(store, Disk)
        self._slices = slices
        self.budget = budget
        self._smallest = smallest
        self._spans = _Spans(store, device)
        self._found: WeakValueDictionary[_Source, _RestingStorage] = WeakValueDictionary()
        self._group: _ModuleGroup | None = None

    def begin(self) -> None:
        """Begin with a forward pass."""
        self._group = None

    def begin_pass(self, root: nn.Module) -> None:
        """Begin with a forward pass through `root`, one of the roots of the budget."""
        self.begin()
        if self.budget is not None and torch.is_grad_enabled():
            self.budget.begin_pass(root)

    def see_output(self, output: object) -> None:
        """Count the output of a pass, which is alive until its backward, in the budget."""
        if self.budget is not None and torch.is_grad_enabled():
            for tensor in tensors_within(output):
                self.budget.see(tensor, None)
            self.budget.end_forward()

    def close(self) -> None:
        """Give the store's memory back. Graphs that are alive can still run backward."""
        self._spans.close()

    def pack(self, tensor: Tensor, module: object) -> RestingView | None:
        """Let a tensor that autograd saves within `module` rest; None for one that stays.

        What is neither dense nor floating point stays, as does a view that reads its memory another way (conjugated), and
        a zero without memory, as forward-mode differentiation has them.
        """
        moves = self._moves(tensor)
        if self.budget is not None:
            self.budget.see(tensor, module, moves=moves)
        slices = self._slices if self._slices is not None and module in self._slices else None
        if self.budget is not None and not self.budget.recomputes(module):
            slices = None  # of what a block keeps, ranks have other tensors
        if not moves or not (self._moves_all or slices is not None):
            return None
        source = _Source.of(tensor)
        resting = self._found.get(source)
        if resting is None and slices is None and self.budget is not None and not self.budget.rests(module):
            return None
        if self._group is None or self._group.module is not module:
            self._group = _ModuleGroup(module, self._group)
        if resting is None:
            with torch.no_grad():
                found = source.read(tensor)
                own = found if slices is None else slices.own(found, module)
                span = self._spans.take(own.numel())  # a full disk raises here
                resting = self._found[source] = _RestingStorage(self._spans, span, source, own, slices)
                self._group.add(resting)
            self.rested_bytes += resting.bytes
        return RestingView(storage=resting, group=self._group, dtype=tensor.dtype, size=tensor.size(),
                           stride=tensor.stride(), offset=source.offset_of(tensor))

    def _moves(self, tensor: Tensor) -> bool:
        kind: Any = type(tensor)
        return (kind is Tensor and tensor.layout is torch.strided and tensor.is_floating_point()
                and tensor.device == self._device and not tensor.is_nested and not tensor.is_neg()
                and not tensor._is_zerotensor()
                and tensor.untyped_storage().nbytes() >= self._smallest)


def version_witness(tensor: Tensor) -> Tensor:
    """Return a tensor without memory whose `_version` is that of `tensor` from now on: writes to that count in it."""
    witness = tensor.detach()  # shares the counter of versions, and keeps it when it is given other memory
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness
