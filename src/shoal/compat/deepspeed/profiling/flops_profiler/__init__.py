"""The published profiler of operations."""

from shoal.compat.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(("FlopsProfiler", "get_model_profile"), f"{__name__}.profiler"))
