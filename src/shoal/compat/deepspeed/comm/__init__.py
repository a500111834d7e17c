"""Collectives under their published names."""

from shoal.comm import *  # noqa: F403
from shoal.comm import ReduceOp as ReduceOp
from shoal.compat.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {})
