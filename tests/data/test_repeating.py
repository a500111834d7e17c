"""`RepeatingLoader` starts the next epoch by itself and resumes with its loader."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from shoal.data import Loader, RepeatingLoader
from shoal.errors import UsageError


def loader() -> Loader:
    return Loader(range(6), batch_size=2, collate_fn=list)


def test_it_starts_the_next_epoch_by_itself() -> None:
    repeating, plain = RepeatingLoader(loader()), loader()
    assert list(islice(repeating, 9)) == [*plain, *plain, *plain]
    assert len(repeating) == 3


def test_it_repeats_any_iterable() -> None:
    assert list(islice(RepeatingLoader([1, 2]), 5)) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("stop", range(8))
def test_it_resumes_with_its_loader(stop: int) -> None:
    straight = list(islice(RepeatingLoader(loader()), 12))
    first, second = RepeatingLoader(loader()), RepeatingLoader(loader())
    head = list(islice(first, stop))
    next(second)
    second.load_state_dict(first.state_dict())
    assert head + list(islice(second, 12 - stop)) == straight


def test_it_follows_load_state_dict_of_its_loader() -> None:
    inner = loader()
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
