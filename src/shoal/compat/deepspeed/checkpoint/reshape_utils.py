"""Helpers of scripts that change the number of ranks of a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.compat.deepspeed.checkpoint.constants import (
    BF16_ZERO_FILE_PREFIX,
    FP16_ZERO_FILE_PREFIX,
    ZERO_FILE_PREFIX,
)
from shoal.compat.deepspeed.utils.logging import logger

__all__ = ["basic_folder_validation", "get_files", "get_files_with_prefix", "get_zero_files", "merge_state",
           "partition_data", "sort_zero_files", "validate_files"]

_RANKS = re.compile(r"(\d+)_mp_rank_(\d+)")


def basic_folder_validation(dir: str) -> None:
    """Raise `AssertionError` unless `dir` is a folder."""
    assert os.path.exists(dir), f"{dir}: does not exist"
    assert os.path.isdir(dir), f"{dir}: is not a folder"


def get_files(dir: str) -> list[str]:
    """Return the paths of all files below a folder."""
    return [str(path) for path in sorted(Path(dir).rglob("*")) if path.is_file()]


def get_files_with_prefix(all_files: Sequence[str], prefix: str) -> list[str]:
    """Return the paths whose file name begins with `prefix`, sorted."""
    return sorted(path for path in all_files if os.path.basename(path).startswith(prefix))


def validate_files(file_list: Sequence[str]) -> None:
    """Log the files that are missing."""
    for path in file_list:
        if not os.path.isfile(path):
            logger.warning("%s: is missing", path)


def sort_zero_files(files: Sequence[str], prefix: str) -> list[str]:
    """Return the optimizer files by data rank, then model rank; raises `ValueError` for a name without them."""
    def ranks(path: str) -> tuple[int, ...]:
        found = _RANKS.search(os.path.basename(path))
        if found is None:
            raise ValueError(f"{path}: the name has no data and model rank; it should begin with {prefix}0_mp_rank_00")
        return tuple(map(int, found.groups()))

    return sorted(files, key=ranks)


def get_zero_files(dir: str) -> list[str]:
    """Return the optimizer files of a folder, by rank."""
    files = get_files(dir)
    for prefix in (ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX, BF16_ZERO_FILE_PREFIX):
        if found := get_files_with_prefix(files, prefix):
            return sort_zero_files(found, prefix)
    return []


def partition_data(data_list: Sequence[Any], num_partitions: int) -> list[list[Any]]:
    """Return a list in equal parts; raises `AssertionError` if it cannot be divided."""
    count = len(data_list)
    assert count % num_partitions == 0, f"partition_data: {count} items cannot be divided into {num_partitions} parts"
    size = count // num_partitions
    return [list(data_list[first:first + size]) for first in range(0, count, size)]


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[str] = ()) -> Any:
    """Return two nested states joined: tensors by their elements in order, numbers and other values from the first.

    Raises `ValueError` for lists of different lengths, and for states of different types.
    """
    where = "/".join(map(str, key_list)) or "the state"
    if type(state_a) is not type(state_b):
        raise ValueError(f"{where}: cannot merge a {type(state_a).__name__} and a {type(state_b).__name__}")
    match state_a:
        case dict():
            return {key: merge_state(state_a.get(key, value), value, [*key_list, str(key)])
                    for key, value in state_b.items()}
        case list():
            if len(state_a) != len(state_b):
                raise ValueError(f"{where}: cannot merge lists of {len(state_a)} and {len(state_b)} items")
            return [merge_state(one, other, key_list) for one, other in zip(state_a, state_b, strict=True)]
        case Tensor():
            return torch.cat([state_a, state_b], dim=0) if state_a.dim() else state_a
        case _:
            return state_a
