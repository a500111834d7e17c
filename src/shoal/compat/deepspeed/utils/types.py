"""Published enumerations of layers."""

from enum import IntEnum

__all__ = ["GATED_ACTIVATION_TYPES", "ActivationFuncType", "NormType"]


class ActivationFuncType(IntEnum):
    """An activation function."""

    UNKNOWN = 0
    GELU = 1
    ReLU = 2
    GATED_GELU = 3
    GATED_SILU = 4


GATED_ACTIVATION_TYPES = [ActivationFuncType.GATED_GELU, ActivationFuncType.GATED_SILU]


class NormType(IntEnum):
    """A normalization."""

    UNKNOWN = 0
    LayerNorm = 1
    GroupNorm = 2
    RMSNorm = 3
