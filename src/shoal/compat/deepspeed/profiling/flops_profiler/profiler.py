"""The published profiler of operations."""

from shoal.compat.unsupported import unsupported_class, unsupported_function

_INSTEAD = "count by torch.utils.flop_counter.FlopCounterMode; `with engine.trace() as trace` times a step"
FlopsProfiler = unsupported_class("FlopsProfiler", _INSTEAD)
get_model_profile = unsupported_function("get_model_profile", _INSTEAD)
number_to_string = unsupported_function("number_to_string", _INSTEAD)
macs_to_string = unsupported_function("macs_to_string", _INSTEAD)
flops_to_string = unsupported_function("flops_to_string", _INSTEAD)
params_to_string = unsupported_function("params_to_string", _INSTEAD)
duration_to_string = unsupported_function("duration_to_string", _INSTEAD)
