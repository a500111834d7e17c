"""The loss of logits that are split over ranks."""

from shoal.compat.unsupported import unsupported_function

_INSTEAD = "shoal.sequence_parallel.cross_entropy is the loss of sequences that are split over ranks"
vocab_sequence_parallel_cross_entropy = unsupported_function("vocab_sequence_parallel_cross_entropy", _INSTEAD)
