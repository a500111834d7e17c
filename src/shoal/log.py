"""One library logger. Every record carries the rank. Without logging configured by the application, records go to stderr."""

from __future__ import annotations

import logging

_warned: set[str] = set()


class _RankFilter(logging.Filter):
    rank = 0

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]  generic only in newer stubs
    """Writes to stderr while the root logger has no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


_rank_filter = _RankFilter()
_fallback = _Fallback()
_fallback.setFormatter(logging.Formatter("[shoal, rank %(rank)d] %(levelname)s: %(message)s"))
logger = logging.getLogger("shoal")
logger.addHandler(_fallback)
logger.addFilter(_rank_filter)


def set_rank(rank: int) -> None:
    """Stamp every later record of the library's logger with `rank`."""
    _rank_filter.rank = rank


def warn_once(message: str) -> None:
    """Log `message` as a warning, once in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
