"""Mixtures of experts."""

from shoal.compat.unsupported import unsupported_class, unsupported_function

_INSTEAD = "write the experts as modules: at every stage they train like any others"
MOELayer = unsupported_class("MOELayer", _INSTEAD)
TopKGate = unsupported_class("TopKGate", _INSTEAD)
top1gating = unsupported_function("top1gating", _INSTEAD)
top2gating = unsupported_function("top2gating", _INSTEAD)
topkgating = unsupported_function("topkgating", _INSTEAD)
