"""The published structures."""

from shoal.attention.sparsity import SparsityConfig as SparsityConfig
from shoal.attention.structures import BigBirdSparsityConfig as BigBirdSparsityConfig
from shoal.attention.structures import BSLongformerSparsityConfig as BSLongformerSparsityConfig
from shoal.attention.structures import DenseSparsityConfig as DenseSparsityConfig
from shoal.attention.structures import FixedSparsityConfig as FixedSparsityConfig
from shoal.attention.structures import LocalSlidingWindowSparsityConfig as LocalSlidingWindowSparsityConfig
from shoal.attention.structures import VariableSparsityConfig as VariableSparsityConfig
