"""The loader has one global order, gives ranks equal batches, and resumes exactly; `RepeatingLoader` never ends."""

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from shoal.data import Loader, RepeatingLoader
from shoal.errors import CheckpointError, ConfigError, UsageError

counts = st.integers(1, 40)
ranks_ = st.integers(1, 5)
sizes = st.integers(1, 6)


class Numbers(IterableDataset[int]):
    def __init__(self, end: int) -> None:
        self.end = end
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.end))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def loaders(dataset: Any, ranks: int, size: int, **options: Any) -> list[Loader]:
    return [Loader(dataset, batch_size=size, rank=rank, ranks=ranks, collate_fn=list, **options) for rank in range(ranks)]


def steps(group: list[Loader], limit: int | None = None) -> list[list[int]]:
    """Return the samples of each global step in rank order; assert that all ranks have equally many batches of one size."""
    columns = [list(islice(loader, limit)) for loader in group]
    rows = list(zip(*columns, strict=True))
    assert all(len({len(batch) for batch in row}) == 1 for row in rows)
    return [[sample for batch in row for sample in batch] for row in rows]


def flat(rows: list[list[int]]) -> list[int]:
    return [sample for row in rows for sample in row]


def resumed(group: list[Loader], ranks: int, size: int, **options: Any) -> list[Loader]:
    states = [loader.state_dict() for loader in group]
    assert all(state == states[0] for state in states)
    after = loaders(group[0].dataset, ranks, size, **options)
    for loader in after:
        loader.load_state_dict(states[0])
    return after


def assert_complete(samples: list[int], expected: range, ranks: int) -> None:
    """Assert that every sample appears, with fewer than `ranks` repeats in total."""
    assert set(samples) == set(expected)
    assert len(samples) - len(expected) < ranks


@settings(deadline=None)
@given(counts, ranks_, sizes, st.booleans(), st.integers(0, 5))
def test_an_epoch_has_every_sample_once_and_equal_batches_per_rank(
        n: int, ranks: int, size: int, shuffle: bool, seed: int) -> None:
    group = loaders(range(n), ranks, size, shuffle=shuffle, seed=seed)
    rows = steps(group)
    assert [len(loader) for loader in group] == [len(rows)] * ranks
    assert_complete(flat(rows), range(n), ranks)
    assert_complete(flat(steps(group)), range(n), ranks)


@settings(deadline=None)
@given(counts, ranks_, sizes, st.integers(0, 5))
def test_the_global_order_does_not_depend_on_the_number_of_ranks(n: int, ranks: int, size: int, seed: int) -> None:
    one = flat(steps(loaders(range(n), 1, 1, seed=seed)))
    many = flat(steps(loaders(range(n), ranks, size, seed=seed, drop_last=False)))
    assert many[: n - n % (ranks * size)] == one[: n - n % (ranks * size)]
    assert many[:n] == one


@settings(deadline=None)
@given(st.integers(30, 60), ranks_, sizes)
def test_drop_last_leaves_only_full_global_batches(n: int, ranks: int, size: int) -> None:
    group = loaders(range(n), ranks, size, drop_last=True)
    rows = steps(group)
    assert [len(row) for row in rows] == [ranks * size] * (n // (ranks * size)) == [ranks * size] * len(group[0])
    assert max(Counter(flat(rows)).values()) == 1


@settings(deadline=None)
@given(counts, ranks_, sizes, ranks_, sizes, st.integers(0, 8), st.integers(0, 2), st.booleans())
def test_a_resume_on_other_ranks_and_batches_neither_repeats_nor_skips(
        n: int, ranks: int, size: int, ranks_after: int, size_after: int, stop: int, epoch: int, drop_last: bool) -> None:
    if drop_last:
        n += max(ranks * size, ranks_after * size_after)
    before = loaders(range(n), ranks, size, drop_last=drop_last)
    for _ in range(epoch):
        steps(before)
    whole = flat(steps(resumed(before, 1, 1)))
    stop = max(1, min(stop, len(before[0]) - 1))
    head = flat(steps(before, stop))
    rest = flat(steps(resumed(before, ranks_after, size_after, drop_last=drop_last)))
    left = n - len(head)
    if stop == len(before[0]) or (drop_last and left < ranks_after * size_after):  # the epoch is complete
        following = loaders(range(n), ranks_after, size_after, drop_last=drop_last)
        for loader in following:
            loader.load_state_dict({**loader.state_dict(), "epoch": epoch + 1})
        assert rest == flat(steps(following))
    elif drop_last:
        assert head + rest == whole[: n - left % (ranks_after * size_after)]
    else:
        assert (head + rest)[:n] == whole
        assert len(head + rest) - n < ranks_after


@settings(deadline=None)
@given(counts, ranks_, sizes, st.integers(1, 12))
def test_a_resume_on_the_same_ranks_equals_an_uninterrupted_run(n: int, ranks: int, size: int, stop: int) -> None:
    def endless(group: list[Loader], count: int) -> list[list[int]]:
        rows: list[list[int]] = []
        while len(rows) < count:
            rows += steps(group, count - len(rows))
        return rows

    straight = endless(loaders(range(n), ranks, size), stop + 9)
    broken = loaders(range(n), ranks, size)
    head = endless(broken, stop)
    assert head + endless(resumed(broken, ranks, size), 9) == straight


def test_epochs_and_seeds_have_their_own_orders() -> None:
    loader = loaders(range(30), 1, 30)[0]
    first, second = next(iter(loader)), next(iter(loader))
    other = next(iter(loaders(range(30), 1, 30, seed=1)[0]))
    assert len({tuple(first), tuple(second), tuple(other)}) == 3
    assert first == next(iter(loaders(range(30), 1, 30)[0]))


def test_without_shuffle_the_order_is_the_datasets() -> None:
    assert steps(loaders(range(10), 2, 2, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_uneven_last_step_repeats_its_first_samples() -> None:
    assert steps(loaders(range(7), 3, 2, shuffle=False)) == [[0, 1, 2, 3, 4, 5], [6, 6, 6]]
    assert steps(loaders(range(11), 3, 2, shuffle=False))[1] == [6, 7, 8, 9, 10, 6]


def test_an_abandoned_epoch_is_followed_by_the_next() -> None:
    loader = loaders(range(8), 1, 2)[0]
    next(iter(loader))
    assert (loader.epoch, len(list(loader)), loader.epoch) == (0, 4, 2)


def test_the_position_of_the_last_step_stays_until_the_next_epoch() -> None:
    loader = loaders(range(8), 1, 2)[0]
    batches = iter(loader)
    next(batches)
    loader.note_step()
    next(batches)
    assert loader.trained_state() == {**loader.state_dict(), "samples": 2} != loader.state_dict()
    next(iter(loader))
    assert loader.trained_state() == {**loader.state_dict(), "epoch": 1, "samples": 0}, "an epoch that was left is over"


def test_the_position_counts_delivered_not_prefetched_samples() -> None:
    loader = Loader(range(40), batch_size=2, ranks=2, num_workers=2, collate_fn=list)
    batches = iter(loader)
    got = [next(batches) for _ in range(3)]
    assert loader.state_dict()["samples"] == 12
    plain = Loader(range(40), batch_size=2, ranks=2, collate_fn=list)
    assert got == list(islice(plain, 3))


def test_an_iteration_follows_a_load() -> None:
    loader = loaders(range(8), 1, 2, shuffle=False)[0]
    start = loader.state_dict()
    batches = iter(loader)
    next(batches)
    next(batches)
    loader.load_state_dict(start)
    assert list(batches) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("order", ["skip before load", "load before skip"])
def test_a_position_without_batches_left_is_that_of_the_next_epoch(order: str) -> None:
    (before,) = loaders(range(10), 1, 5, shuffle=False)
    next(iter(before))
    state = before.state_dict()
    (loader,) = loaders(range(10), 1, 5, shuffle=False)
    if order == "skip before load":
        before.skip(0, range(5, 10))
        loader.load_state_dict(before.state_dict())
    else:
        loader.load_state_dict(state)
        assert loader.epoch == 0
        loader.skip(0, range(5, 10))
    assert loader.epoch == 1
    assert loader.trained_state() == loader.state_dict()
    assert [list(loader) for _ in range(loader.epoch, 3)] == [[[0, 1, 2, 3, 4]]] * 2


def test_a_larger_batch_that_is_dropped_leaves_the_next_epoch() -> None:
    (before,) = loaders(range(10), 1, 2, drop_last=True)
    list(islice(before, 3))
    (loader,) = loaders(range(10), 1, 5, drop_last=True)
    loader.load_state_dict(before.state_dict())
    assert loader.epoch == 1


def test_a_skip_within_an_iteration_leaves_its_epoch_as_it_is() -> None:
    (loader,) = loaders(range(10), 1, 5, shuffle=False)
    batches = iter(loader)
    next(batches)
    loader.skip(0, range(5, 10))
    assert loader.epoch == 0
    assert next(batches) == [5, 6, 7, 8, 9]


def test_iterating_does_not_change_the_random_state() -> None:
    before = torch.get_rng_state()
    list(Loader(range(8), batch_size=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_are_tensors_without_a_collate_function() -> None:
    assert torch.equal(next(iter(Loader(range(4), batch_size=4, shuffle=False))), torch.arange(4))


@settings(deadline=None)
@given(counts, ranks_, sizes, ranks_, sizes, st.integers(1, 5))
def test_an_iterable_dataset_is_divided_and_resumes_on_other_ranks(
        n: int, ranks: int, size: int, ranks_after: int, size_after: int, stop: int) -> None:
    assert steps(loaders(Numbers(n), ranks, size)) == steps(loaders(range(n), ranks, size, shuffle=False))
    before = loaders(Numbers(n), ranks, size)
    head = flat(steps(before, stop))[:n]
    rest = flat(steps(resumed(before, ranks_after, size_after)))
    assert (rest if len(head) == n else head + rest)[:n] == list(range(n))


def test_workers_divide_an_iterable_dataset_as_one_process_does() -> None:
    workers = loaders(Numbers(23), 2, 3, num_workers=2)
    assert steps(workers) == steps(loaders(Numbers(23), 2, 3))


def test_an_iterable_dataset_gets_the_epoch_and_a_resume_logs_the_skip(caplog: pytest.LogCaptureFixture) -> None:
    stream = Numbers(9)
    loader = loaders(stream, 1, 2)[0]
    list(loader)
    next(iter(loader))
    with caplog.at_level(logging.WARNING, "shoal"):
        rest = list(resumed([loader], 1, 2)[0])
    assert rest[0] == [2, 3]
    assert stream.epochs == [0, 1, 1]
    assert "Numbers is an iterable dataset, so resuming reads it from the start and discards 2 samples" in caplog.text


def test_an_iterable_dataset_has_no_length() -> None:
    with pytest.raises(TypeError, match="Numbers is an iterable dataset without __len__"):
        len(loaders(Numbers(3), 1, 1)[0])


def test_an_iterable_dataset_without_samples_is_rejected() -> None:
    with pytest.raises(UsageError, match="Numbers yielded no batch of 2 samples"):
        list(loaders(Numbers(0), 1, 2)[0])


def test_an_older_iteration_cannot_continue() -> None:
    loader = loaders(range(8), 1, 2)[0]
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(UsageError, match="a newer iteration of this loader has begun"):
        next(old)


def test_an_empty_dataset_is_rejected() -> None:
    with pytest.raises(UsageError, match="training_data: got list with no samples"):
        Loader([], batch_size=1)


def test_a_dataset_smaller_than_a_dropped_batch_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"3 samples, fewer than one global batch of 8 \(4 a rank on 2 ranks\)"):
        Loader([1, 2, 3], batch_size=4, ranks=2, drop_last=True)


def test_a_dataset_without_len_is_rejected() -> None:
    class Endless(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(UsageError, match="got Endless, which lacks __len__ or __getitem__"):
        Loader(Endless(), batch_size=1)


def test_a_generator_is_rejected() -> None:
    with pytest.raises(UsageError, match="got generator, which lacks __len__ or __getitem__"):
        Loader((i for i in range(3)), batch_size=1)


def test_a_mapping_of_datasets_is_rejected() -> None:
    with pytest.raises(UsageError, match="got dict, a mapping with the keys train, test; give the dataset under one"):
        Loader({"train": [1], "test": [2]}, batch_size=1)


def test_the_batch_size_must_be_at_least_one() -> None:
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu: got 0"):
        Loader([1], batch_size=0)


def test_the_rank_must_be_below_the_number_of_ranks() -> None:
    with pytest.raises(ConfigError, match="rank: got 2 of 2 ranks"):
        Loader([1], batch_size=1, rank=2, ranks=2)


def test_another_dataset_length_is_rejected_on_resume() -> None:
    with pytest.raises(CheckpointError, match="the dataset's length was 5 in the checkpoint and is 4 here"):
        Loader(range(4), batch_size=1).load_state_dict(Loader(range(5), batch_size=1).state_dict())


def test_another_shuffle_is_rejected_on_resume() -> None:
    with pytest.raises(CheckpointError, match="the dataset's shuffle was False in the checkpoint and is True here"):
        Loader(range(4), batch_size=1).load_state_dict(Loader(range(4), batch_size=1, shuffle=False).state_dict())


def test_a_foreign_state_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="the checkpoint lacks epoch, length, samples, seed, shuffle"):
        Loader(range(4), batch_size=1).load_state_dict({})


def test_a_resume_uses_the_checkpoints_seed(caplog: pytest.LogCaptureFixture) -> None:
    stored, loader = (Loader(range(40), batch_size=40, seed=seed) for seed in (3, 4))
    with caplog.at_level(logging.WARNING, "shoal"):
        loader.load_state_dict(stored.state_dict())
    assert "using the checkpoint's seed 3 instead of 4" in caplog.text
    assert torch.equal(next(iter(loader)), next(iter(stored)))


def small_loader() -> Loader:
    return Loader(range(6), batch_size=2, collate_fn=list)


def test_a_repeating_loader_starts_the_next_epoch_by_itself() -> None:
    repeating, plain = RepeatingLoader(small_loader()), small_loader()
    assert list(islice(repeating, 9)) == [*plain, *plain, *plain]
    assert len(repeating) == 3


def test_a_repeating_loader_repeats_any_iterable() -> None:
    assert list(islice(RepeatingLoader([1, 2]), 5)) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("stop", range(8))
def test_a_repeating_loader_resumes_with_its_loader(stop: int) -> None:
    straight = list(islice(RepeatingLoader(small_loader()), 12))
    first, second = RepeatingLoader(small_loader()), RepeatingLoader(small_loader())
    head = list(islice(first, stop))
    next(second)
    second.load_state_dict(first.state_dict())
    assert head + list(islice(second, 12 - stop)) == straight


def test_a_repeating_loader_follows_load_state_dict_of_its_loader() -> None:
    inner = small_loader()
    start = inner.state_dict()
    repeating = RepeatingLoader(inner)
    first = [next(repeating), next(repeating)]
    inner.load_state_dict(start)
    assert [next(repeating), next(repeating)] == first


def test_an_exhausted_iterator_is_rejected() -> None:
    def numbers() -> Iterator[Any]:
        yield 1

    repeating = RepeatingLoader(numbers())
    assert next(repeating) == 1
    with pytest.raises(UsageError, match="RepeatingLoader: generator yields no batches; an iterator can be used once only"):
        next(repeating)


def test_a_loader_without_state_is_named() -> None:
    with pytest.raises(UsageError, match="RepeatingLoader: list has no state_dict and load_state_dict"):
        RepeatingLoader([1]).state_dict()


def test_a_loader_without_length_gives_no_length() -> None:
    with pytest.raises(TypeError, match="generator has no length"):
        len(RepeatingLoader(i for i in range(3)))
