"""The facts of the distribution that stands in for DeepSpeed: its version, its metadata and its commands.

The version is that of the release whose surface the tree has (docs/migrating.md). The local part `+shoal` marks the
stand-in: `pip` treats both as one distribution, so that one replaces the other.
"""

from __future__ import annotations

from shoal.compat.deepspeed import __version__ as VERSION

__all__ = ["COMMANDS", "NAME", "VERSION", "entry_points", "is_stand_in", "metadata"]

NAME = "deepspeed"
LOCAL = "+shoal"

COMMANDS = {
    "deepspeed": "shoal.compat.deepspeed.launcher.runner:command",
    "deepspeed.pt": "shoal.compat.deepspeed.launcher.runner:command",
    "ds": "shoal.compat.deepspeed.launcher.runner:command",
    "ds_report": "shoal.compat.deepspeed.env_report:cli_main",
    "dsr": "shoal.compat.deepspeed.env_report:cli_main",
    "ds_elastic": "shoal.compat.deepspeed.launcher.ds_elastic:command",
    "zero_to_fp32.py": "shoal.compat.deepspeed.utils.zero_to_fp32:command",
}
"""The commands, and the function that runs each."""


def is_stand_in(version: str) -> bool:
    """Return whether `version` is that of a stand-in, and not of the original."""
    return LOCAL in version


def metadata() -> str:
    """Return the text of METADATA."""
    return (f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
            "Summary: Shoal under the name of DeepSpeed. For local installation alone.\n"
            "License: Apache-2.0\nRequires-Python: >=3.11\nRequires-Dist: shoal\n")


def entry_points() -> str:
    """Return the text of entry_points.txt."""
    return "\n".join(["[console_scripts]", *(f"{name} = {target}" for name, target in COMMANDS.items()), ""])
