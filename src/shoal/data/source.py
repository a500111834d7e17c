"""Batch sources read this rank's batches from any position of a map-style or an iterable dataset.

Both yield `(batch, samples)`: this rank's share of a step, and the number of samples of the step over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from shoal.data.order import Position, SampleRange, StepSplit, generator, permutation
from shoal.errors import UsageError
from shoal.log import logger

__all__ = ["BatchSource", "Collate", "IndexedSource", "Options", "StreamSource", "source"]

Collate = Callable[[list[Any]], Any]
Batches = Iterator[tuple[Any, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The `DataLoader` options: the collate function, the number of worker processes, pinned memory or not."""

    collate: Collate | None
    workers: int
    pin_memory: bool


class BatchSource(Protocol):
    """Yields the batches of this rank from any position."""

    length: int | None

    def batches(self, position: Position, seed: int, left_out: frozenset[int]) -> Batches:
        """Yield the remaining batches of the epoch, without the samples that are `left_out`."""
        ...

    def indices(self, drawn: SampleRange, seed: int, left_out: frozenset[int]) -> list[int]:
        """Return the indices in the dataset of samples that batches had."""
        ...


@runtime_checkable
class _Index(Sized, Protocol):
    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class _ShufflesByEpoch(Protocol):
    """An iterable dataset that shuffles by epoch."""

    def set_epoch(self, epoch: int) -> None: ...


def source(dataset: object, split: StepSplit, options: Options, *, shuffle: bool) -> BatchSource:
    """Return the source for `dataset`. Raises `UsageError` if it is not a dataset or cannot fill a batch."""
    if isinstance(dataset, IterableDataset):
        return StreamSource(cast(Iterable[Any], dataset), split, options)
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        keys = ", ".join(str(key) for key in cast(Mapping[object, object], dataset))
        raise UsageError(f"training_data: got {kind}, a mapping with the keys {keys}; give the dataset under one of them")
    if not isinstance(dataset, _Index):
        raise UsageError(f"training_data: got {kind}, which lacks __len__ or __getitem__, so its samples cannot be "
                         f"divided over ranks; define both, or make it a torch.utils.data.IterableDataset")
    if len(dataset) == 0:
        raise UsageError(f"training_data: got {kind} with no samples; give at least one")
    if split.drop_last and len(dataset) < split.step_samples:
        raise UsageError(f"training_data: got {kind} with {len(dataset)} samples, fewer than one global batch of "
                         f"{split.step_samples} ({split.size} a rank on {split.ranks} ranks), so dropping the last batch "
                         f"leaves none; set dataloader_drop_last to false, or make the batch smaller")
    return IndexedSource(dataset, split, options, shuffle=shuffle)


@dataclass(frozen=True, slots=True)
class _BatchSampler:
    """This rank's sample indices, a list per step."""

    order: Tensor
    split: StepSplit

    def __len__(self) -> int:
        return self.split.steps(len(self.order))

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for samples in self.split.step_sizes(len(self.order)):
            step = self.order[start : start + samples]
            yield step[list(self.split.share(samples))].tolist()
            start += samples


class IndexedSource:
    """Reads a map-style dataset: one permutation per epoch, and only the samples of this rank are read."""

    def __init__(self, dataset: _Index, split: StepSplit, options: Options, *, shuffle: bool) -> None:
        self.length: int | None = len(dataset)
        self._samples = len(dataset)
        self._dataset, self._split, self._options, self._shuffle = dataset, split, options, shuffle

    def batches(self, position: Position, seed: int, left_out: frozenset[int]) -> Batches:
        """Yield the batches after the first `position.samples` samples of the epoch's order."""
        order = self._order(position.epoch, seed, left_out)[position.samples :]
        options, split = self._options, self._split
        loader = DataLoader[Any](cast(Dataset[Any], self._dataset), batch_sampler=_BatchSampler(order, split),
                                 collate_fn=options.collate, num_workers=options.workers, pin_memory=options.pin_memory,
                                 generator=generator(seed, position.epoch, split.rank))
        yield from zip(loader, split.step_sizes(len(order)), strict=True)

    def indices(self, drawn: SampleRange, seed: int, left_out: frozenset[int]) -> list[int]:
        """Return the indices in the dataset of samples that batches had."""
        return self._order(drawn.epoch, seed, left_out)[drawn.start : drawn.stop].tolist()

    def _order(self, epoch: int, seed: int, left_out: frozenset[int]) -> Tensor:
        return permutation(self._samples, seed, epoch, shuffle=self._shuffle, left_out=left_out)


class _StreamShare(IterableDataset[tuple[list[Any], int]]):
    """Yields this rank's share of each step; worker w of n yields steps w, w + n, w + 2n, ..."""

    def __init__(self, stream: Iterable[Any], split: StepSplit, start: int, left_out: frozenset[int]) -> None:
        self._stream, self._split, self._start, self._left_out = stream, split, start, left_out

    def __iter__(self) -> Iterator[tuple[list[Any], int]]:
        worker = get_worker_info()
        index, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        kept = (each for number, each in enumerate(self._stream) if number not in self._left_out)
        stream = islice(kept if self._left_out else self._stream, self._start, None)
        for step in count():
            samples = list(islice(stream, self._split.step_samples))
            share = self._split.share(len(samples))
            if not share:
                return
            if step % workers == index:
                yield [samples[i] for i in share], len(samples)


@dataclass(frozen=True, slots=True)
class _CollateShare:
    collate: Collate

    def __call__(self, share: Any) -> tuple[Any, int]:
        samples, step_samples = share
        return self.collate(samples), step_samples


class StreamSource:
    """Reads an iterable dataset: every rank and worker reads all samples and keeps its share.

    The dataset must yield the same samples on every rank and after a resume, which reads and discards the samples
    delivered before. `set_epoch` is called if the dataset has it. The dataset is not shuffled here.
    """

    length: int | None = None

    def __init__(self, dataset: Iterable[Any], split: StepSplit, options: Options) -> None:
        self._dataset, self._split, self._options = dataset, split, options

    def indices(self, drawn: SampleRange, seed: int, left_out: frozenset[int]) -> list[int]:
        """Return the numbers in the stream of samples that batches had."""
        return list(islice((number for number in count() if number not in left_out), drawn.start, drawn.stop))

    def batches(self, position: Position, seed: int, left_out: frozenset[int]) -> Batches:
        """Yield the batches after the first `position.samples` samples of the dataset."""
        if isinstance(self._dataset, _ShufflesByEpoch):
            self._dataset.set_epoch(position.epoch)
        if position.samples:
            logger.warning(f"training_data: {type(self._dataset).__name__} is an iterable dataset, so resuming reads it "
                           f"from the start and discards {position.samples} samples")
        options = self._options
        share = _StreamShare(self._dataset, self._split, position.samples, left_out)
        yield from DataLoader[Any](share, batch_size=None, collate_fn=_CollateShare(options.collate or default_collate),
                                   num_workers=options.workers, pin_memory=options.pin_memory,
                                   generator=generator(seed, position.epoch, self._split.rank))
