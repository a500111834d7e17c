"""The published search for a fast configuration."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "`shoal config show FILE --ranks N` prices a configuration"
Autotuner = unsupported_class("Autotuner", _INSTEAD)
