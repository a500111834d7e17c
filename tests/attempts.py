"""How attempts of a step end: counted while a test lasts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from shoal.optim.attempt import Attempt


@contextmanager
def counted_ends() -> Generator[Counter[str]]:
    """Give how many attempts are accepted ("accept") and undone ("undo") within the context."""
    ends = Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for end in ("accept", "undo"):
            patch.setattr(Attempt, end, _counting(end, ends))
        yield ends


def _counting(end: str, ends: Counter[str]) -> Callable[[Attempt], None]:
    ending: Callable[[Attempt], None] = getattr(Attempt, end)

    def counted(attempt: Attempt) -> None:
        ends[end] += 1
        ending(attempt)

    return counted
