"""Collectives under their published names."""

from shoal.compat.deepspeed.comm.comm import *  # noqa: F403
from shoal.compat.deepspeed.comm.comm import ReduceOp as ReduceOp
from shoal.compat.deepspeed.comm.constants import *  # noqa: F403
from shoal.compat.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {
    **{name: f"{__name__}.comm" for name in ("CommsLogger", "comms_logger", "in_aml", "in_aws_sm", "in_dlts", "timed_op",
                                             "timers")},
    "TorchBackend": f"{__name__}.torch",
})
