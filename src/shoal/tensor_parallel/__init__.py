"""Tensor parallelism: layers sliced over the ranks of a tensor axis, and plans that slice an existing model."""

from shoal.tensor_parallel.axis import Axis
from shoal.tensor_parallel.layers import ColumnLinear, QKVLinear, RowLinear
from shoal.tensor_parallel.parallelize import parallelize
from shoal.tensor_parallel.plan import Plan
from shoal.tensor_parallel.plan_rules import (
    Column,
    Dropout,
    Head,
    Heads,
    Kind,
    Norm,
    Region,
    Row,
    Sequence,
    Vocabulary,
    Whole,
)
from shoal.tensor_parallel.random import Apart, align
from shoal.tensor_parallel.regions import enter, gather, leave, share, split
from shoal.tensor_parallel.replicated import PartDropout, Shared
from shoal.tensor_parallel.vocabulary import VocabularyEmbedding, VocabularyHead, vocabulary_cross_entropy

__all__ = [
    "Apart",
    "Axis",
    "Column",
    "ColumnLinear",
    "Dropout",
    "Head",
    "Heads",
    "Kind",
    "Norm",
    "PartDropout",
    "Plan",
    "QKVLinear",
    "Region",
    "Row",
    "RowLinear",
    "Sequence",
    "Shared",
    "Vocabulary",
    "VocabularyEmbedding",
    "VocabularyHead",
    "Whole",
    "align",
    "enter",
    "gather",
    "leave",
    "parallelize",
    "share",
    "split",
    "vocabulary_cross_entropy",
]
