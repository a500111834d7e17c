"""The section `data_efficiency` with the published defaults of its nested sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["get_data_efficiency_config", "get_data_efficiency_enabled"]

DEFAULTS: Mapping[str, Any] = {
    "enabled": False, "seed": 1234,
    "data_sampling": {
        "enabled": False, "num_epochs": 1000, "num_workers": 0, "pin_memory": False,
        "curriculum_learning": {"enabled": False},
        "dynamic_batching": {"enabled": False, "lr_scaling_method": "linear", "min_batch_size": 1, "max_batch_size": None,
                             "sequence_picking_order": "dataloader", "verbose": False}},
    "data_routing": {"enabled": False, "random_ltd": {"enabled": False, "layer_token_lr_schedule": {"enabled": False}}}}


def get_data_efficiency_enabled(param_dict: Mapping[str, Any]) -> bool:
    """Return whether the section of a configuration is enabled."""
    return get_data_efficiency_config(param_dict)["enabled"]


def get_data_efficiency_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a configuration, with the defaults of what it leaves out."""
    return _filled(DEFAULTS, param_dict.get("data_efficiency", {}))


def _filled(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: _filled(value, given.get(key, {})) for key, value in defaults.items() if isinstance(value, Mapping)}
    return {**defaults, **given, **nested}
