"""Readers and writers of single checkpoint files."""

from shoal.compat.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {})
