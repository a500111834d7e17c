"""Activations between forward and backward: saved tensors are kept, moved to another tier, or computed again.

    recompute   a block keeps its inputs (full), or its products and attention too (selective), and runs again in backward
    rest        saved tensors stay on the compute device, or their storages are copied to host memory or to a disk
    partition   each tensor rank keeps one slice of a recomputed block's inputs
    budget      the first pass measures the blocks, which then recompute as little as the budget allows, or rest

The first three compose: a slice of the inputs of recomputed blocks is what rests. Values are bitwise those that were saved.
Of nested `torch.autograd.graph.saved_tensors_hooks` only the innermost act, so the hooks of `zero/saved_tensors.py`, which
track weights, ask `SavedActivations` for all other tensors.
"""

from shoal.activation.budget import ALONE, Budget, Moment
from shoal.activation.recompute import RecomputeMode, end_interrupted, recompute_blocks
from shoal.activation.saved import RestingView, SavedActivations, Slices
from shoal.activation.settings import ActivationSettings

__all__ = ["ALONE", "ActivationSettings", "Budget", "Moment", "RecomputeMode", "RestingView", "SavedActivations", "Slices",
           "end_interrupted", "recompute_blocks"]
