"""The published logger: a `logging.Logger` named DeepSpeed, which writes to stdout from the level WARNING on."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.errors import UsageError

__all__ = ["LoggerFactory", "get_current_level", "get_dist_msg", "get_log_level_from_string", "log_dist", "log_dist_once",
           "log_levels", "logger", "print_configuration", "print_dist", "print_json_dist", "set_log_level_from_string",
           "should_log_le"]

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


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a level; raises `ValueError` for an unknown name."""
    level = log_levels.get(str(log_level_str).lower())
    if level is None:
        raise _UnknownLevel(f"log level: got {log_level_str!r}; choose {', '.join(log_levels)}")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the logger by name; raises `ValueError` for an unknown name."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    """Return the level of the logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the level of the logger is at most a named one; raises `ValueError` for an unknown name."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """Return `message` with the rank in front, None on a rank that `ranks` leaves out."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    return f"[Rank {rank}] {message}" if not ranks or -1 in ranks or rank in ranks or rank == -1 else None


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Write `message` on these ranks, by default on all, whatever the level of the logger."""
    if (text := get_dist_msg(message, ranks)) is not None:
        sys.stdout.write(f"{text}\n")


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | None = None) -> None:
    """Write a dict and the rank as JSON to the file `path`, on these ranks, by default on all."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if path is not None and get_dist_msg("", ranks) is not None:
        Path(path).write_text(json.dumps({**message, "rank": rank}))


def print_configuration(args: Any, name: str) -> None:
    """Log the attributes of an object."""
    logger.info("%s:", name)
    for key, value in sorted(vars(args).items()):
        logger.info("  %s %s %s", key, "." * max(1, 29 - len(key)), value)


class _UnknownLevel(UsageError, ValueError):
    """A level that no logger has."""
