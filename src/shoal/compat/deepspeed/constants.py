"""Published constants of the launcher and of process groups."""

from datetime import timedelta

from shoal.compat.environment import timeout_minutes

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=timeout_minutes())
LOCAL_RANK, CROSS_RANK, CROSS_SIZE = "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE"
INFERENCE_GENERIC_MODE, INFERENCE_SPECIALIZED_MODE = "generic", "specialized"
