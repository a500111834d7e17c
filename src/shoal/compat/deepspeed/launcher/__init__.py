"""`deepspeed.launcher`: the command line, the resources of a job, and the commands of its back ends."""

from shoal.compat.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {})
