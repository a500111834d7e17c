"""The published package of this path."""

from shoal.compat.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {})
