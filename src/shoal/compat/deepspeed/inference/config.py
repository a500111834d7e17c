"""Configuration of inference engines."""

from shoal.compat.unsupported import unsupported_class

DeepSpeedInferenceConfig = unsupported_class("DeepSpeedInferenceConfig", "there is no inference engine")
