"""Inference engines."""

from shoal.compat.unsupported import unsupported_class

InferenceEngine = unsupported_class("InferenceEngine", "generate with the module of a training engine, or with vLLM")
