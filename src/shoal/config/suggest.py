"""A mistyped word has one nearest match among the words that are allowed, or none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed word most like `word`, or None when none is like it.

    Case is ignored. Likeness is the ratio of `difflib.SequenceMatcher` and must reach 0.6; a word that contains `word`
    whole (`lr` in `warmup_max_lr` would not count: at least four letters) is taken when nothing else is like it.
    """
    words = {candidate.lower(): candidate for candidate in sorted(allowed)}
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    if close:
        return words[close[0]]
    containing = [candidate for lowered, candidate in words.items() if len(word) >= 4 and word.lower() in lowered]
    return min(containing, key=len, default=None)
