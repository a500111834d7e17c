"""C++ with a way in torch beside it, always: what is fast where there is a compiler, and right everywhere."""
