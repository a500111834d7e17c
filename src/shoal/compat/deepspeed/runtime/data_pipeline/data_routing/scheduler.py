"""The schedule of dropped tokens."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "pass all tokens; progressive_layer_drop drops whole layers"
BaseScheduler = unsupported_class("BaseScheduler", _INSTEAD)
RandomLTDScheduler = unsupported_class("RandomLTDScheduler", _INSTEAD)
