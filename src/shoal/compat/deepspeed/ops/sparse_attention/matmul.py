"""The published products of block-sparse matrices."""

from shoal.attention.block_products import MatMul as MatMul
