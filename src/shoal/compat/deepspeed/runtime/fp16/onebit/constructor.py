"""Keywords of the published constructors of compressing optimizers that Shoal's own do not have."""

from __future__ import annotations

from shoal.compat.raising import published_errors
from shoal.errors import ConfigError, UsageError
from shoal.log import warn_once

__all__ = ["check_unused"]


def check_unused(name: str, amsgrad: bool, max_grad_norm: float, cuda_aware: bool, comm_backend_name: str) -> None:
    """Raise for `amsgrad` and `max_grad_norm` that are set; warn of a transport that was chosen, which has no effect."""
    with published_errors():
        if amsgrad:
            raise UsageError(f"{name}: got amsgrad=True; it has no such variant: leave it out")
        if max_grad_norm:
            raise ConfigError(f"{name}: got max_grad_norm={max_grad_norm}; the engine clips, not the optimizer: set "
                              f"gradient_clipping in the configuration")
    if cuda_aware or comm_backend_name != "nccl":
        warn_once(f"{name}: cuda_aware and comm_backend_name have no effect: compressed tensors are sent over the job's own "
                  f"process groups")
