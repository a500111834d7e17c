"""One sequence over several ranks: each has a part of the positions, and only attention and the loss need the others'."""

from shoal.sequence_parallel.attention import attend_sequence
from shoal.sequence_parallel.axis import SequenceAxis
from shoal.sequence_parallel.block_plan import block_plan
from shoal.sequence_parallel.heads import exchange_heads, heads_plan
from shoal.sequence_parallel.loss import cross_entropy, mean_loss
from shoal.sequence_parallel.split import Positions, split_batch

__all__ = ["Positions", "SequenceAxis", "attend_sequence", "block_plan", "cross_entropy", "exchange_heads", "heads_plan",
           "mean_loss", "split_batch"]
