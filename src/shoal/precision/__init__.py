"""The dtypes of training (compute, reduce, accumulate, master), and loss scaling for fp16."""

from __future__ import annotations

from shoal.precision.loss_scale import DynamicScale, LossScale, StaticScale, make_loss_scale
from shoal.precision.policy import Policy, dtype_named, policy

__all__ = ["DynamicScale", "LossScale", "Policy", "StaticScale", "dtype_named", "make_loss_scale", "policy"]
