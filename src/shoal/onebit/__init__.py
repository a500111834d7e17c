"""One bit an element and one scale a block: what is sent of a flat vector, and what of it stays with the sender."""

from shoal.onebit.layout import BLOCK, is_finite, packed_bytes
from shoal.onebit.packing import difference, pack, unpack

__all__ = ["BLOCK", "difference", "is_finite", "pack", "packed_bytes", "unpack"]
