"""Data loaders with a resumable position: `Loader` delivers one epoch per iteration, `RepeatingLoader` never ends.

The position of a `Loader` is the epoch and the number of samples delivered over all ranks. The batches before a save and
after the resume together make exactly one epoch. `order.py` assigns samples to ranks, so a position does not depend on
the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from shoal.data.order import Position, SampleRange, StepSplit
from shoal.errors import CheckpointError, ConfigError, UsageError
from shoal.log import warn_once

__all__ = ["Loader", "RepeatingLoader"]

T = TypeVar("T")


class Loader:
    """Yield this rank's microbatches of `dataset`, one epoch per iteration.

    `dataset` is a map-style dataset (`__len__` and `__getitem__`) or a `torch.utils.data.IterableDataset`. `batch_size`
    is the number of samples in one microbatch of one rank. `shuffle` and `seed` select one global order per epoch, the
    same for any number of `ranks`; an iterable dataset keeps its own order. The last samples of an epoch that do not
    fill a global batch are dropped (`drop_last`), or divided into equal shares padded with at most `ranks - 1` repeated
    samples. Every rank therefore has the same number of batches.

    Raises `ConfigError` for numbers out of range, `UsageError` for a dataset that cannot be divided over ranks.
    """

    def __init__(self, dataset: object, *, batch_size: int, rank: int = 0, ranks: int = 1, shuffle: bool = True,
                 seed: int = 0, drop_last: bool = False, collate_fn: Callable[[list[Any]], Any] | None = None,
                 num_workers: int = 0, pin_memory: bool = False) -> None:
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank: got {rank} of {ranks} ranks; it must be at least 0 and below the number of ranks")
        self.dataset = dataset
        self.drop_last = drop_last
        self._seed = seed
        self._shuffle = shuffle
        self._rank, self._ranks = rank, ranks
        self._workers, self._collate, self._pin_memory = num_workers, collate_fn, pin_memory
        self._position = self._trained = Position()
        self._fresh = True  # the next iteration starts at the position; if False, at the epoch after it
        self._iteration = 0
        self._skipped: list[tuple[int, frozenset[int]]] = []
        """Samples that are left out, each set with the first epoch that it is left out of."""
        self._drawn: list[SampleRange] | None = None
        self.resize(batch_size)

    def resize(self, batch_size: int) -> None:
        """Deliver microbatches of `batch_size` samples from now on, in a running iteration too.

        Raises `ConfigError` for a size below 1, `UsageError` if the dataset cannot fill one global batch.
        """
        from shoal.data.source import Options, source  # imports torch.utils.data, which is slow

        if batch_size < 1:
            raise ConfigError(f"train_micro_batch_size_per_gpu: got {batch_size}; it must be 1 or more")
        split = StepSplit(size=batch_size, rank=self._rank, ranks=self._ranks, drop_last=self.drop_last)
        options = Options(collate=self._collate, workers=self._workers, pin_memory=self._pin_memory)
        self._source = source(self.dataset, split, options, shuffle=self._shuffle)
        self._split = split
        self.batch_size = batch_size
        if not self._fresh:  # a new object: a running iteration sees that the position changed and reads the new source
            self._position = Position(epoch=self._position.epoch, samples=self._position.samples)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; after the last batch of an epoch, the following epoch."""
        return self._position.epoch

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch. Raises TypeError for an iterable dataset without a length."""
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"training_data: {type(self.dataset).__name__} is an iterable dataset without __len__, so "
                            f"the loader has no length; count steps instead")
        return self._split.steps(len(self.dataset) - len(self._left_out(self._position.epoch)))

    def skip(self, epoch: int, samples: Iterable[int]) -> None:
        """Leave `samples` out, by their index in the dataset, from `epoch` on; the position must lie before them."""
        known = self._left_out(epoch)
        if new := frozenset(samples) - known:
            self._skipped.append((epoch, new))
            self._leave_ended_epoch()

    def note_step(self) -> None:
        """Note that a step has trained on all samples that were delivered so far, for `trained_state`."""
        self._trained = self._position

    def note_samples(self) -> None:
        """Note from now on which samples are delivered, for `take_samples`."""
        self._drawn = []

    def take_samples(self) -> list[SampleRange]:
        """Return the ranges of samples that all ranks have delivered since the last call."""
        drawn = self._drawn or []
        if self._drawn is not None:
            self._drawn = []
        return drawn

    def indices(self, drawn: SampleRange) -> list[int]:
        """Return the indices in the dataset of delivered samples."""
        return self._source.indices(drawn, self._seed, self._left_out(drawn.epoch))

    def _left_out(self, epoch: int) -> frozenset[int]:
        return frozenset[int]().union(*(samples for start, samples in self._skipped if start <= epoch))

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or the rest of the epoch that `load_state_dict` moved to.

        A running iteration follows a `load_state_dict`. Raises `UsageError` when a newer iteration has started, and for
        an iterable dataset that yields no batch.
        """
        if not self._fresh:
            self._position = self._trained = Position(epoch=self._position.epoch + 1)
        self._iteration += 1
        yield from self._deliver(self._iteration)

    def _deliver(self, iteration: int) -> Iterator[Any]:
        self._fresh = False
        start = position = self._position
        for batch, samples in self._source.batches(start, self._seed, self._left_out(start.epoch)):
            position = self._advance(samples)
            yield batch
            if self._iteration != iteration:
                raise UsageError("training_data: a newer iteration of this loader has begun, and a loader has one "
                                 "position; go on with the newer one, or build a second loader")
            if self._position is not position:  # load_state_dict moved it
                yield from self._deliver(iteration)
                return
        if position is start:
            yield from self._skip_to_next_epoch(iteration)
        elif not self._fresh:  # the end of an iterable dataset of unknown length
            self._go_to_epoch(start.epoch + 1)

    def _advance(self, samples: int) -> Position:
        """Count a batch as delivered just before it is yielded; batches prefetched by workers do not count."""
        epoch, delivered = self._position.epoch, self._position.samples + samples
        if self._drawn is not None:
            self._drawn.append(SampleRange(epoch=epoch, start=self._position.samples, stop=delivered))
        self._position = Position(epoch=epoch, samples=delivered)
        if self._is_epoch_ended():
            self._go_to_epoch(epoch + 1)
        return self._position

    def _is_epoch_ended(self) -> bool:
        """Whether samples of the epoch were delivered and no batch is left; never of a dataset of unknown length."""
        epoch, delivered, length = self._position.epoch, self._position.samples, self._source.length
        return (length is not None and delivered > 0
                and self._split.steps(length - len(self._left_out(epoch)) - delivered) <= 0)

    def _leave_ended_epoch(self) -> None:
        """Go on to the next epoch where the next iteration would find no batch in this one."""
        if self._fresh and self._is_epoch_ended():
            self._go_to_epoch(self._position.epoch + 1)
            self._trained = self._position

    def _skip_to_next_epoch(self, iteration: int) -> Iterator[Any]:
        if self._position.samples == 0:
            raise UsageError(f"training_data: {type(self.dataset).__name__} yielded no batch of {self._split.step_samples} "
                             f"samples ({self.batch_size} a rank on {self._split.ranks} ranks, drop_last is "
                             f"{self.drop_last}); an iterable dataset must start again each time that it is iterated")
        self._go_to_epoch(self._position.epoch + 1)
        yield from self._deliver(iteration)

    def _go_to_epoch(self, epoch: int) -> None:
        self._position = Position(epoch=epoch)
        self._fresh = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the parameters of the order as JSON values; the same on every rank."""
        skipped = [[epoch, sorted(samples)] for epoch, samples in self._skipped]
        return {"epoch": self._position.epoch, "samples": self._position.samples, "seed": self._seed,
                "shuffle": self._shuffle, "length": self._source.length, **({"skipped": skipped} if skipped else {})}

    def trained_state(self) -> dict[str, Any]:
        """Return `state_dict` with the position of the last `note_step`: later samples are delivered again after a load."""
        return {**self.state_dict(), "epoch": self._trained.epoch, "samples": self._trained.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a stored position and use its seed. The number of ranks and the batch size may differ from the save.

        Raises `CheckpointError` as `check` does.
        """
        self.check(state)
        if state["seed"] != self._seed:
            warn_once(f"training_data: using the checkpoint's seed {state['seed']} instead of {self._seed}")
        self._seed = int(state["seed"] or 0)
        self._skipped = [(epoch, frozenset(samples)) for epoch, samples in state.get("skipped", [])]
        self._position = self._trained = Position(epoch=int(state["epoch"] or 0), samples=int(state["samples"] or 0))
        self._fresh = True
        self._leave_ended_epoch()

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` if a stored position is not valid here.

        It is not valid when the dataset had another length or another `shuffle`, because the order was then different.
        """
        own = {key: value for key, value in self.state_dict().items() if key != "skipped"}
        if own.keys() - state.keys():
            raise CheckpointError(f"training_data: the checkpoint lacks {', '.join(sorted(own.keys() - state.keys()))}; "
                                  f"was it saved by another loader?")
        for key in ("length", "shuffle"):
            if state[key] != own[key]:
                raise CheckpointError(f"training_data: the dataset's {key} was {state[key]} in the checkpoint and is "
                                      f"{own[key]} here, so its position is not valid here; use the same data, or load "
                                      f"the model alone")


@runtime_checkable
class _Resumable(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class RepeatingLoader(Generic[T]):
    """Iterate over `loader` without end; the object is its own iterator. Raises `UsageError` if `loader` yields nothing."""

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._batches: Iterator[T] | None = None

    def __len__(self) -> int:
        """Return the number of batches of one epoch. Raises TypeError if the loader has no length."""
        if not isinstance(self.loader, Sized):
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return len(self.loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._batches is not None:
            for batch in self._batches:
                return batch
        self._batches = iter(self.loader)
        for batch in self._batches:
            return batch
        raise UsageError(f"RepeatingLoader: {type(self.loader).__name__} yields no batches; an iterator can be used once "
                         f"only, so give the loader that it came from")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `loader`. Raises `UsageError` if it has none."""
        return self._resumable().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move `loader` to `state` and continue from there. Raises `UsageError` if it cannot."""
        self._resumable().load_state_dict(state)
        self._batches = None

    def _resumable(self) -> _Resumable:
        if not isinstance(self.loader, _Resumable):
            raise UsageError(f"RepeatingLoader: {type(self.loader).__name__} has no state_dict and load_state_dict, so its "
                             f"position cannot be stored; use shoal's loader (training_data), or another resumable one")
        return self.loader
