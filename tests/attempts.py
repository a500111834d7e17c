"""How attempts of a step end: counted while a test lasts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from shoal.optim.speculative_step import SpeculativeStep


@contextmanager
def counted_ends() -> Generator[Counter[str]]:
    """Give how many attempts are accepted ("accept") and undone ("undo") within the context."""
    ends = Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for end in ("accept", "undo"):
            patch.setattr(SpeculativeStep, end, _counting(end, ends))
        yield ends


def _counting(end: str, ends: Counter[str]) -> Callable[[SpeculativeStep], None]:
    ending: Callable[[SpeculativeStep], None] = getattr(SpeculativeStep, end)

    def counted(attempt: SpeculativeStep) -> None:
        ends[end] += 1
        ending(attempt)

    return counted
