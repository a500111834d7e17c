"""Checkpoints by Azure's service."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "set checkpoint.async_save to true: saving overlaps with training"
DeepSpeedNebulaConfig = unsupported_class("DeepSpeedNebulaConfig", _INSTEAD)
