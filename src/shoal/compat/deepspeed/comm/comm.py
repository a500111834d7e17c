"""Collectives under their published names."""

from shoal.comm import *  # noqa: F403
from shoal.comm import init_distributed as init_distributed
