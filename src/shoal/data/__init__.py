"""Data that is dealt to ranks in one global order and resumes where it stopped, on any number of ranks."""

from __future__ import annotations

from shoal.data.loader import Loader
from shoal.data.order import Position
from shoal.data.repeating import RepeatingLoader

__all__ = ["Loader", "Position", "RepeatingLoader"]
