"""The published tools for BERT and RoBERTa."""

from shoal.attention.bert import SparseAttentionUtils as SparseAttentionUtils
