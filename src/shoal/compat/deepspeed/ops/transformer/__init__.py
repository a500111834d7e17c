"""Fused transformer layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

from shoal.log import warn_once
from shoal.nn.transformer_layer import TransformerConfig
from shoal.nn.transformer_layer import TransformerLayer as DeepSpeedTransformerLayer

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"]


class DeepSpeedTransformerConfig(TransformerConfig):
    """The published configuration, whose mappings and files may have other keys."""

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> Self:
        """Return the configuration of a mapping. Other keys become attributes, as published, with a warning."""
        known = {field.name for field in fields(cls)}
        found = super().from_dict({key: value for key, value in json_object.items() if key in known})
        others = {key: value for key, value in json_object.items() if key not in known}
        if others:
            warn_once(f"DeepSpeedTransformerConfig: unknown keys {', '.join(sorted(others))}; no layer reads them")
        vars(found).update(others)
        return found
