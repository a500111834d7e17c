"""A loader whose position is a count of delivered samples: what it gave before and after a resume is one whole epoch.

`order.py` says which rank gets what; nothing here depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from shoal.data.order import Deal, Position
from shoal.errors import CheckpointError, ConfigError, UsageError
from shoal.log import warn_once

__all__ = ["Loader"]


class Loader:
    """This rank's microbatches of `dataset`, an epoch per iteration.

    `dataset` has `len` and an index, or is a `torch.utils.data.IterableDataset`. `batch_size` counts the samples of one
    microbatch of one rank. `shuffle` and `seed` choose one global order per epoch, the same for any `ranks` (a stream
    keeps its own). The last samples of an epoch that fill no global batch are dropped (`drop_last`), or dealt in equal
    shares, filled up with at most `ranks - 1` repeats; so every rank has the same number of batches.

    Raises `ConfigError` for numbers out of range, `UsageError` for a dataset that cannot be dealt.
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
        self._position = Position()
        self._fresh = True  # the next iteration starts at the position; else it starts the epoch after it
        self._iteration = 0
        self.resize(batch_size)

    def resize(self, batch_size: int) -> None:
        """Deal microbatches of `batch_size` samples from here on; a running iteration goes on with them.

        Raises `ConfigError` for less than 1, `UsageError` where the dataset cannot fill one global batch.
        """
        from shoal.data.source import Options, source  # slow to import with older torch

        if batch_size < 1:
            raise ConfigError(f"train_micro_batch_size_per_gpu: got {batch_size}; it must be 1 or more")
        deal = Deal(size=batch_size, rank=self._rank, ranks=self._ranks, drop_last=self.drop_last)
        options = Options(collate=self._collate, workers=self._workers, pin_memory=self._pin_memory)
        self._source = source(self.dataset, deal, options, shuffle=self._shuffle)
        self._deal = deal
        self.batch_size = batch_size
        if not self._fresh:  # a position of its own: a running iteration takes it for a move, and asks the new source
            self._position = Position(epoch=self._position.epoch, samples=self._position.samples)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, or of the one after it once an epoch's last batch is delivered."""
        return self._position.epoch

    def __len__(self) -> int:
        """Return the batches of a whole epoch. Raises TypeError, as `len` must, for a stream that does not know it."""
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"training_data: {type(self.dataset).__name__} is a stream without __len__, so the loader "
                            f"has no length; count steps instead")
        return self._deal.steps(len(self.dataset))

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or the rest of the one that `load_state_dict` went to.

        A `load_state_dict` while this runs is followed. Raises `UsageError` when a newer iteration has taken the
        position over, and for a stream without a single batch.
        """
        if not self._fresh:
            self._position = Position(epoch=self._position.epoch + 1)
        self._iteration += 1
        yield from self._deliver(self._iteration)

    def _deliver(self, iteration: int) -> Iterator[Any]:
        self._fresh = False
        start = position = self._position
        for batch, samples in self._source.batches(start, self._seed):
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
        elif not self._fresh:  # a stream's end shows only when nothing comes after it
            self._go_to_epoch(start.epoch + 1)

    def _advance(self, samples: int) -> Position:
        """Count a batch as delivered just before it is; what workers have prefetched does not count."""
        epoch, delivered = self._position.epoch, self._position.samples + samples
        length = self._source.length
        if length is not None and self._deal.steps(length - delivered) == 0:
            self._go_to_epoch(epoch + 1)
        else:
            self._position = Position(epoch=epoch, samples=delivered)
        return self._position

    def _skip_to_next_epoch(self, iteration: int) -> Iterator[Any]:
        if self._position.samples == 0:
            raise UsageError(f"training_data: {type(self.dataset).__name__} gave no batch of {self._deal.step} samples "
                             f"({self.batch_size} a rank on {self._deal.ranks} ranks, drop_last is {self.drop_last}); a "
                             f"stream must start anew each time that it is iterated")
        self._go_to_epoch(self._position.epoch + 1)
        yield from self._deliver(iteration)

    def _go_to_epoch(self, epoch: int) -> None:
        self._position = Position(epoch=epoch)
        self._fresh = True

    def state_dict(self) -> dict[str, int | bool | None]:
        """Return the position and what the order depends on, as JSON values; the same on every rank."""
        return {"epoch": self._position.epoch, "samples": self._position.samples, "seed": self._seed,
                "shuffle": self._shuffle, "length": self._source.length}

    def load_state_dict(self, state: Mapping[str, int | bool | None]) -> None:
        """Go to a stored position, whatever number of ranks and batch size it was stored with; its seed is taken over.

        Raises `CheckpointError` as `check` does.
        """
        self.check(state)
        if state["seed"] != self._seed:
            warn_once(f"training_data: going on with the checkpoint's seed {state['seed']} in place of {self._seed}")
        self._seed = int(state["seed"] or 0)
        self._position = Position(epoch=int(state["epoch"] or 0), samples=int(state["samples"] or 0))
        self._fresh = True

    def check(self, state: Mapping[str, int | bool | None]) -> None:
        """Raise `CheckpointError` when a stored position means nothing here: its order was another one, because the dataset
        had another length, or was shuffled or not."""
        own = self.state_dict()
        if own.keys() - state.keys():
            raise CheckpointError(f"training_data: the checkpoint lacks {', '.join(sorted(own.keys() - state.keys()))}; "
                                  f"was it saved by another loader?")
        for key in ("length", "shuffle"):
            if state[key] != own[key]:
                raise CheckpointError(f"training_data: the dataset's {key} was {state[key]} in the checkpoint and is "
                                      f"{own[key]} here, so its position means nothing here; use the same data, or load "
                                      f"the model alone")
