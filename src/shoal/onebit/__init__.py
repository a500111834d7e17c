"""1-bit compression of flat vectors: one sign bit an element, one scale a block; the residual stays with the sender."""

from shoal.onebit.packing import difference, pack, unpack
from shoal.onebit.reference import BLOCK, is_finite, packed_bytes

__all__ = ["BLOCK", "difference", "is_finite", "pack", "packed_bytes", "unpack"]
