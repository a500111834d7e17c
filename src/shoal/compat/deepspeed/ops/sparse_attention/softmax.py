"""The published softmax of block-sparse matrices."""

from shoal.attention.block_products import Softmax as Softmax
