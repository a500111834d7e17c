"""Training and generation in one engine."""

from shoal.compat.unsupported import unsupported_class

DeepSpeedHybridEngine = unsupported_class("DeepSpeedHybridEngine", "generate within zero.GatheredParameters(model)")
