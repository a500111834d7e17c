"""The published sampler of curriculum learning."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "order samples by a sampler of your own, whose difficulty runtime.data_pipeline.curriculum_scheduler gives"
DeepSpeedDataSampler = unsupported_class("DeepSpeedDataSampler", _INSTEAD)
