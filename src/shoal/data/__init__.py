"""Data loading: one global sample order, divided over the data ranks, and resumable on any number of ranks."""

from __future__ import annotations

from shoal.data.loader import Loader, RepeatingLoader
from shoal.data.order import Position

__all__ = ["Loader", "Position", "RepeatingLoader"]
