"""Tensor-parallel layers whose collectives hide behind halves of a batch."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "set tensor_parallel.autotp_size: the mesh slices the layers of a model"
DominoTransformer = unsupported_class("DominoTransformer", _INSTEAD)
DominoTransformerLayer = unsupported_class("DominoTransformerLayer", _INSTEAD)
