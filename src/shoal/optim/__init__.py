"""Optimizers, their registry, and their steps over sharded and offloaded state."""

from __future__ import annotations

from shoal.optim.elementwise import check_elementwise
from shoal.optim.lamb import Lamb
from shoal.optim.lion import Lion
from shoal.optim.registry import make_optimizer, register_optimizer

__all__ = ["Lamb", "Lion", "check_elementwise", "make_optimizer", "register_optimizer"]
