"""One library logger, silent until the application configures it; every record knows its rank."""

from __future__ import annotations

import logging

_warned: set[str] = set()


class _RankFilter(logging.Filter):
    rank = 0

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True


_rank_filter = _RankFilter()
logger = logging.getLogger("shoal")
logger.addHandler(logging.NullHandler())
logger.addFilter(_rank_filter)


def set_rank(rank: int) -> None:
    """Stamp every later record of the library's logger with `rank`."""
    _rank_filter.rank = rank


def warn_once(message: str) -> None:
    """Log `message` as a warning the first time that it is said in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
