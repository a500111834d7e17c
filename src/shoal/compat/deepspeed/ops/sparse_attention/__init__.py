"""Block-sparse attention under its published names."""

from shoal.compat.deepspeed.ops.sparse_attention.bert_sparse_self_attention import (
    BertSparseSelfAttention as BertSparseSelfAttention,
)
from shoal.compat.deepspeed.ops.sparse_attention.matmul import MatMul as MatMul
from shoal.compat.deepspeed.ops.sparse_attention.softmax import Softmax as Softmax
from shoal.compat.deepspeed.ops.sparse_attention.sparse_attention_utils import SparseAttentionUtils as SparseAttentionUtils
from shoal.compat.deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention as SparseSelfAttention
from shoal.compat.deepspeed.ops.sparse_attention.sparsity_config import BigBirdSparsityConfig as BigBirdSparsityConfig
from shoal.compat.deepspeed.ops.sparse_attention.sparsity_config import (
    BSLongformerSparsityConfig as BSLongformerSparsityConfig,
)
from shoal.compat.deepspeed.ops.sparse_attention.sparsity_config import DenseSparsityConfig as DenseSparsityConfig
from shoal.compat.deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig as FixedSparsityConfig
from shoal.compat.deepspeed.ops.sparse_attention.sparsity_config import (
    LocalSlidingWindowSparsityConfig as LocalSlidingWindowSparsityConfig,
)
from shoal.compat.deepspeed.ops.sparse_attention.sparsity_config import SparsityConfig as SparsityConfig
from shoal.compat.deepspeed.ops.sparse_attention.sparsity_config import VariableSparsityConfig as VariableSparsityConfig
