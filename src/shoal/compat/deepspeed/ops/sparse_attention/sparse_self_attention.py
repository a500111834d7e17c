"""The published module of attention."""

from shoal.attention.self_attention import SparseSelfAttention as SparseSelfAttention
