"""Compression of models."""

from shoal.compat.unsupported import unsupported_function

_INSTEAD = "prune and quantize with torch.ao, before initialize"
init_compression = unsupported_function("init_compression", _INSTEAD)
redundancy_clean = unsupported_function("redundancy_clean", _INSTEAD)
student_initialization = unsupported_function("student_initialization", _INSTEAD)
