"""Loaders under their published names."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from shoal.data import RepeatingLoader as RepeatingLoader
from shoal.data.loader import Loader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


class DeepSpeedDataLoader(metaclass=ABCMeta):  # noqa: B024  Shoal's loader is registered below
    """This rank's batches of a dataset by a torch loader; without `data_sampler` a `DistributedSampler` shuffles.

    `engine.deepspeed_io` gives Shoal's own loader, whose position a checkpoint holds, unless it is given a sampler.
    """

    def __init__(self, dataset: Any, batch_size: int, pin_memory: bool, local_rank: int, tput_timer: Any,
                 collate_fn: Any = None, num_local_io_workers: int | None = None, data_sampler: Any = None,
                 data_parallel_world_size: int | None = None, data_parallel_rank: int | None = None,
                 dataloader_drop_last: bool = False, deepspeed_dataloader_config: Any = None):
        if data_sampler is None:
            data_sampler = (RandomSampler(dataset) if data_parallel_world_size is None and local_rank < 0 else
                            DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank))
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_sampler = data_sampler
        self.collate_fn = collate_fn
        self.tput_timer = tput_timer
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset, batch_size=batch_size, sampler=data_sampler, collate_fn=collate_fn, pin_memory=pin_memory,
            num_workers=num_local_io_workers or 0, drop_last=dataloader_drop_last)
        self.len = len(self.dataloader)
        self._epoch = 0
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return self.len

    def __iter__(self) -> DeepSpeedDataLoader:
        if isinstance(self.data_sampler, DistributedSampler):
            self.data_sampler.set_epoch(self._epoch)
        self._epoch += 1
        self._batches = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            iter(self)
        assert self._batches is not None
        if self.tput_timer is not None:
            self.tput_timer.start()
        return next(self._batches)


DeepSpeedDataLoader.register(Loader)
