"""The published logger: a `logging.Logger` named DeepSpeed, which writes to stdout from the level WARNING on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import cache

import torch.distributed as dist

from shoal.errors import UsageError

__all__ = ["LoggerFactory", "log_dist", "log_dist_once", "log_levels", "logger", "set_log_level_from_string"]

log_levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR,
              "critical": logging.CRITICAL}


class LoggerFactory:
    """Makes loggers of the published form."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return the logger `name`, which writes to stdout and does not propagate."""
        if name is None:
            raise ValueError("create_logger: name is missing; give the name of the logger")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not made.handlers:
            handler = logging.StreamHandler(stream=sys.stdout)
            handler.setFormatter(logging.Formatter(
                "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"))
            made.addHandler(handler)
        return made


logger = LoggerFactory.create_logger(name="DeepSpeed", level=logging.WARNING)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on these ranks; by default, and for [-1], on all of them."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if not ranks or -1 in ranks or rank in ranks or rank == -1:
        logger.log(level, "[Rank %d] %s", rank, message)


@cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` as `log_dist` does, at the first call with it alone."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the logger by name; raises `ValueError` for an unknown name."""
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise _UnknownLevel(f"set_log_level_from_string: got {log_level_str!r}; choose {', '.join(log_levels)}")
    (custom_logger or logger).setLevel(level)


class _UnknownLevel(UsageError, ValueError):
    """A level that no logger has."""
