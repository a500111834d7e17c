"""Marks of scripts that load a universal checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["SubparamShape", "enable_universal_checkpoint"]


@dataclass
class SubparamShape:
    """How parameters that match `patterns` are made of several matrices, for tensor parallelism."""

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


def enable_universal_checkpoint(param_list: Iterable[Any]) -> None:
    """Do nothing: every checkpoint is loaded by names and shapes, the universal form too."""
