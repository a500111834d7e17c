"""Mixtures of experts."""

from shoal.compat.unsupported import unsupported_class

MoE = unsupported_class("MoE", "write the experts as modules: at every stage they train like any others")
