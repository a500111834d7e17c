"""Estimate what a training needs before it runs: the memory of its model state, and what it holds for a while beside it."""

from shoal.plan.model_state import Estimate, Estimates, estimate
from shoal.plan.working_memory import WorkingMemory, estimate_working_memory

__all__ = ["Estimate", "Estimates", "WorkingMemory", "estimate", "estimate_working_memory"]
