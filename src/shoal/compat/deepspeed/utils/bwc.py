"""Accessors of an `mpu` under the oldest of the names that it has."""

from __future__ import annotations

from typing import Any

__all__ = ["bwc_pipeline_parallel_group", "bwc_pipeline_parallel_world_size", "bwc_tensor_model_parallel_group",
           "bwc_tensor_model_parallel_rank", "bwc_tensor_model_parallel_world_size"]


def _first(mpu: Any, names: tuple[str, ...], default: Any) -> Any:
    """Call the first of the methods that `mpu` has, and return its result; `default` if it has none."""
    method = next((found for name in names if (found := getattr(mpu, name, None)) is not None), None)
    return default if method is None else method()


_TENSOR = ("get_tensor_model_parallel_{}", "get_slice_parallel_{}", "get_model_parallel_{}")
_PIPE = ("get_pipeline_model_parallel_{}", "get_pipe_parallel_{}")


def _named(patterns: tuple[str, ...], what: str) -> tuple[str, ...]:
    return tuple(pattern.format(what) for pattern in patterns)


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Return the rank on the tensor axis; 0 without an `mpu`."""
    return _first(mpu, _named(_TENSOR, "rank"), 0)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Return the size of the tensor axis; 1 without an `mpu`."""
    return _first(mpu, _named(_TENSOR, "world_size"), 1)


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Return the group of the tensor axis; None without an `mpu`."""
    return _first(mpu, _named(_TENSOR, "group"), None)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of stages; 1 without an `mpu`."""
    return _first(mpu, _named(_PIPE, "world_size"), 1)


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """Return the group of the stages; None without an `mpu`."""
    return _first(mpu, _named(_PIPE, "group"), None)
