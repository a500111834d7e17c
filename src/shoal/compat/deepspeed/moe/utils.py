"""Published helpers of mixtures of experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.compat.unsupported import unsupported_function


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter is marked as one rank's expert."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether an optimizer group is one of experts."""
    return bool(param_group.get("moe", False))


def has_moe_layers(m: Any) -> tuple[bool, int]:
    """Return whether a model has published layers of experts, and of how many."""
    return False, 0


split_params_into_different_moe_groups_for_optimizer = unsupported_function(
    "split_params_into_different_moe_groups_for_optimizer", "pass ordinary parameter groups")
