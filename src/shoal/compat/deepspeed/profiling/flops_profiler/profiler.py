"""The published profiler of operations."""

from shoal.compat.unsupported import unsupported_class, unsupported_function

_INSTEAD = "count by torch.utils.flop_counter.FlopCounterMode; `with engine.trace() as trace` times a step"
FlopsProfiler = unsupported_class("FlopsProfiler", _INSTEAD)
get_model_profile = unsupported_function("get_model_profile", _INSTEAD)
