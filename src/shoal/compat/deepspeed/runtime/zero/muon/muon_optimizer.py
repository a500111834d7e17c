"""Muon, whose step mixes the elements of a matrix."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "choose an elementwise optimizer, such as FusedAdam or FusedLion"
MuonWithAuxAdam = unsupported_class("MuonWithAuxAdam", _INSTEAD)
