"""Two kinds of datasets give batches from any position: those with an index, and streams.

Both yield `(batch, samples)`: this rank's part of a step, and how many samples the step took over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from shoal.data.order import Deal, Position, generator, permutation
from shoal.errors import UsageError
from shoal.log import logger

__all__ = ["BatchSource", "Collate", "IndexedSource", "Options", "StreamSource", "source"]

Collate = Callable[[list[Any]], Any]
Batches = Iterator[tuple[Any, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How samples become batches: by which function, in how many worker processes, in pinned memory or not."""

    collate: Collate | None
    workers: int
    pin_memory: bool


class BatchSource(Protocol):
    """Batches of this rank from any position."""

    length: int | None

    def batches(self, position: Position, seed: int) -> Batches:
        """Yield the rest of the epoch's batches."""
        ...


@runtime_checkable
class _Index(Sized, Protocol):
    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class _FollowsEpochs(Protocol):
    """A stream that wants to know the epoch, to shuffle itself anew."""

    def set_epoch(self, epoch: int) -> None: ...


def source(dataset: object, deal: Deal, options: Options, *, shuffle: bool) -> BatchSource:
    """Return the source for `dataset`; raise `UsageError` for what is no dataset or can fill no batch."""
    if isinstance(dataset, IterableDataset):
        return StreamSource(cast(Iterable[Any], dataset), deal, options)
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        keys = ", ".join(str(key) for key in cast(Mapping[object, object], dataset))
        raise UsageError(f"training_data: got {kind}, a mapping with the keys {keys}; give the dataset under one of them")
    if not isinstance(dataset, _Index):
        raise UsageError(f"training_data: got {kind}, which lacks __len__ or __getitem__, so its samples cannot be dealt "
                         f"to ranks; define both, or make it a torch.utils.data.IterableDataset")
    if len(dataset) == 0:
        raise UsageError(f"training_data: got {kind} with no samples; give at least one")
    if deal.drop_last and len(dataset) < deal.step:
        raise UsageError(f"training_data: got {kind} with {len(dataset)} samples, fewer than one global batch of "
                         f"{deal.step} ({deal.size} a rank on {deal.ranks} ranks), so dropping the last batch leaves "
                         f"none; set dataloader_drop_last to false, or make the batch smaller")
    return IndexedSource(dataset, deal, options, shuffle=shuffle)


@dataclass(frozen=True, slots=True)
class _Steps:
    """This rank's sample indices, a list per step."""

    order: Tensor
    deal: Deal

    def __len__(self) -> int:
        return self.deal.steps(len(self.order))

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for samples in self.deal.taken(len(self.order)):
            step = self.order[start : start + samples]
            yield step[list(self.deal.share(samples))].tolist()
            start += samples


class IndexedSource:
    """A dataset with `len` and an index: one permutation per epoch, and only the samples of this rank are read."""

    def __init__(self, dataset: _Index, deal: Deal, options: Options, *, shuffle: bool) -> None:
        self.length: int | None = len(dataset)
        self._samples = len(dataset)
        self._dataset, self._deal, self._options, self._shuffle = dataset, deal, options, shuffle

    def batches(self, position: Position, seed: int) -> Batches:
        """Yield the batches of the epoch's order after `position.samples`."""
        order = permutation(self._samples, seed, position.epoch, shuffle=self._shuffle)[position.samples :]
        options, deal = self._options, self._deal
        loader = DataLoader[Any](cast(Dataset[Any], self._dataset), batch_sampler=_Steps(order, deal),
                                 collate_fn=options.collate, num_workers=options.workers, pin_memory=options.pin_memory,
                                 generator=generator(seed, position.epoch, deal.rank))
        yield from zip(loader, deal.taken(len(order)), strict=True)


class _StreamShare(IterableDataset[tuple[list[Any], int]]):
    """This rank's part of each step of a stream, and of those only every n-th with n worker processes."""

    def __init__(self, stream: Iterable[Any], deal: Deal, start: int) -> None:
        self._stream, self._deal, self._start = stream, deal, start

    def __iter__(self) -> Iterator[tuple[list[Any], int]]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        stream = islice(self._stream, self._start, None)
        for step in count():
            samples = list(islice(stream, self._deal.step))
            share = self._deal.share(len(samples))
            if not share:
                return
            if step % workers == mine:
                yield [samples[place] for place in share], len(samples)


@dataclass(frozen=True, slots=True)
class _CollateShare:
    collate: Collate

    def __call__(self, share: Any) -> tuple[Any, int]:
        samples, taken = share
        return self.collate(samples), taken


class StreamSource:
    """A dataset that is only iterated: every rank and worker reads all of it and keeps its own part.

    The stream must be the same on every rank, and the same again for a resume, which reads and throws away what was
    delivered. It is told the epoch if it has `set_epoch`. Its order is its own: nothing is shuffled here.
    """

    length: int | None = None

    def __init__(self, dataset: Iterable[Any], deal: Deal, options: Options) -> None:
        self._dataset, self._deal, self._options = dataset, deal, options

    def batches(self, position: Position, seed: int) -> Batches:
        """Yield the batches of the stream after `position.samples`."""
        if isinstance(self._dataset, _FollowsEpochs):
            self._dataset.set_epoch(position.epoch)
        if position.samples:
            logger.warning(f"training_data: {type(self._dataset).__name__} is a stream, so resuming reads it from its "
                           f"start and throws {position.samples} samples away")
        options = self._options
        share = _StreamShare(self._dataset, self._deal, position.samples)
        yield from DataLoader[Any](share, batch_size=None, collate_fn=_CollateShare(options.collate or default_collate),
                                   num_workers=options.workers, pin_memory=options.pin_memory,
                                   generator=generator(seed, position.epoch, self._deal.rank))
