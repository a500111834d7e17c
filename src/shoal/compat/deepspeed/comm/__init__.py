"""Collectives under their published names."""

from shoal.compat.deepspeed.comm.comm import *  # noqa: F403
from shoal.compat.deepspeed.comm.comm import ReduceOp as ReduceOp
from shoal.compat.deepspeed.comm.constants import *  # noqa: F403
from shoal.compat.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {})
