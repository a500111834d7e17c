"""Attention over split sequences."""

from shoal.compat.unsupported import unsupported_class

DistributedAttention = unsupported_class("DistributedAttention", "tensor_parallel splits sequences between its regions")
