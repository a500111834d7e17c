"""The published fp16 optimizers and loss scalers."""

from shoal.compat.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {})
