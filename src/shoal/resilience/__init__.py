"""A job survives faults: elastic batch sizes, a watch over ranks, copies of the state in memory, a guard of steps."""
