"""Block-sparse attention: a layout says which blocks of keys each block of queries sees, and one operation computes it.

    sparsity configuration  ->  layout (heads, query blocks, key blocks) of 0 and 1  ->  Blocks (compressed rows)
                            ->  attend(q, k, v, blocks)

Dense attention is the layout of ones. Time and memory are proportional to the visited blocks; no tensor of length x length
is made. Every backend gives the output and the log-sum-exp of each row, and drops the same probabilities for the same seed.
"""

from shoal.attention.attend import attend
from shoal.attention.blocks import Blocks
from shoal.attention.hugging_face import register, use_sparse_attention
from shoal.attention.self_attention import BertSparseSelfAttention, SparseSelfAttention
from shoal.attention.settings import sparsity_config
from shoal.attention.sparsity import SparsityConfig, TensorSparsityConfig
from shoal.attention.structures import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    VariableSparsityConfig,
)

__all__ = ["BSLongformerSparsityConfig", "BertSparseSelfAttention", "BigBirdSparsityConfig", "Blocks", "DenseSparsityConfig",
           "FixedSparsityConfig", "LocalSlidingWindowSparsityConfig", "SparseSelfAttention", "SparsityConfig",
           "TensorSparsityConfig", "VariableSparsityConfig", "attend", "register", "sparsity_config",
           "use_sparse_attention"]
