"""Adapters over sharded weights."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "add adapters with peft: their frozen weights are sharded at stage 3"
LoRAConfig = unsupported_class("LoRAConfig", _INSTEAD)
OptimizedLinear = unsupported_class("OptimizedLinear", _INSTEAD)
QuantizationConfig = unsupported_class("QuantizationConfig", _INSTEAD)
