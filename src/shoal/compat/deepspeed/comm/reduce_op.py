"""How tensors of several ranks become one."""

from shoal.compat.collectives import ReduceOp as ReduceOp
