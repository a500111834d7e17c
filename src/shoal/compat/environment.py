"""The environment variables that the published package reads, and Shoal itself does not."""

from __future__ import annotations

import os

__all__ = ["accelerator", "local_size"]


def accelerator() -> str | None:
    """Return the device that DS_ACCELERATOR names, None where it is not set."""
    return os.environ.get("DS_ACCELERATOR") or None


def local_size() -> int:
    """Return how many ranks run on this host, by LOCAL_SIZE of the launcher or LOCAL_WORLD_SIZE of torchrun; else 1."""
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 1
