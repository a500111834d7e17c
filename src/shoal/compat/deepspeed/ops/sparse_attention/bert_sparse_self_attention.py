"""The published self attention of BERT."""

from shoal.attention.self_attention import BertSparseSelfAttention as BertSparseSelfAttention
