"""ZeRO under its published names."""

from shoal.compat.lazy import lazy_names
from shoal.zero import GatheredParameters as GatheredParameters
from shoal.zero import Init as Init

__getattr__, __dir__ = lazy_names(__name__, {})
