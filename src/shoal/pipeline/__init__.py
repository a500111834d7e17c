"""Pipeline parallelism: the model is cut into stages, and microbatches flow through them in the order of a schedule."""
