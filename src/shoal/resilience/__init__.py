"""A job survives faults: batch sizes that fit another number of ranks, a watch over ranks, copies of the state in memory."""
