"""Which dtype each tensor of training has, and how small fp16 gradients are kept from vanishing."""

from __future__ import annotations

from shoal.precision.loss_scale import DynamicScale, LossScale, StaticScale, make_loss_scale
from shoal.precision.policy import Policy, dtype_named, policy

__all__ = ["DynamicScale", "LossScale", "Policy", "StaticScale", "dtype_named", "make_loss_scale", "policy"]
