"""The published structures."""

from shoal.attention.sparsity import BigBirdSparsityConfig as BigBirdSparsityConfig
from shoal.attention.sparsity import BSLongformerSparsityConfig as BSLongformerSparsityConfig
from shoal.attention.sparsity import DenseSparsityConfig as DenseSparsityConfig
from shoal.attention.sparsity import FixedSparsityConfig as FixedSparsityConfig
from shoal.attention.sparsity import LocalSlidingWindowSparsityConfig as LocalSlidingWindowSparsityConfig
from shoal.attention.sparsity import SparsityConfig as SparsityConfig
from shoal.attention.sparsity import VariableSparsityConfig as VariableSparsityConfig
