"""Facts about the installed torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register_grad_hook", "required_torch_version"]


def _numbers(version: object) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", str(version).partition("+")[0])[:2])


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is at least `min_version` and at most `max_version`; raises `AssertionError` if both are missing."""
    assert min_version is not None or max_version is not None, "give min_version or max_version"
    here = _numbers(torch.__version__)
    return ((min_version is None or here >= _numbers(min_version))
            and (max_version is None or here <= _numbers(max_version)))


def register_grad_hook(param: torch.nn.Parameter, hook: Callable[[torch.nn.Parameter], None]) -> Any:
    """Call `hook(param)` after each gradient of the parameter is accumulated; returns the handle."""
    return param.register_post_accumulate_grad_hook(hook)
