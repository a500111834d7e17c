"""The published section `checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CHECKPOINT_DEFAULT_DICT", "VALID_VALUES", "get_checkpoint_config", "get_checkpoint_writer_config"]

CHECKPOINT_DEFAULT_DICT = {"tag_validation": "WARN", "checkpoint_serialization": True, "writer": None}
WRITER_DEFAULTS = {"type": "FAST", "io_buffer_size": 64 << 20, "io_buffer_double": True, "show_statistics": False,
                   "data_parallel": None, "decoupled": False, "io_multiplier": 1}
VALID_VALUES = {"tag_validation": ["WARN", "IGNORE", "FAIL"], "type": ["MOCK", "PYTHON", "FAST"],
                "data_parallel": ["REPLICA", "SOCKET", "MACHINE"]}


def get_checkpoint_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a whole configuration with its defaults; raises `AssertionError` for a wrong choice."""
    section = param_dict.get("checkpoint", {})
    found = _chosen("checkpoint", {key: section.get(key, value) for key, value in CHECKPOINT_DEFAULT_DICT.items()})
    return found | {"writer": get_checkpoint_writer_config(section)}


def get_checkpoint_writer_config(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the entry `writer` of the section with its defaults, None without one."""
    section = param_dict.get("writer")
    if section is None:
        return None
    return _chosen("checkpoint.writer", {key: section.get(key, value) for key, value in WRITER_DEFAULTS.items()})


def _chosen(path: str, section: dict[str, Any]) -> dict[str, Any]:
    """Return the section with its choices in upper case."""
    for key, allowed in VALID_VALUES.items():
        if isinstance(value := section.get(key), str):
            section[key] = value.upper()
            assert section[key] in allowed, f"{path}.{key}: got {value!r}; choose one of {', '.join(allowed)}"
    return section
