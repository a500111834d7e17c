"""C++ kernels, built on first use; each has a torch fallback with the same result, for machines without a compiler."""
