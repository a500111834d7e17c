"""The base of published builders of native code."""

from __future__ import annotations

from types import ModuleType

from shoal.errors import NotSupportedYet

__all__ = ["OpBuilder", "installed_cuda_version"]


class OpBuilder:
    """Says whether a piece of native code is there."""

    NAME = ""
    BUILD_VAR = ""
    COMPATIBLE = False

    def __init__(self, name: str | None = None):
        self.name = name or self.NAME
        self.error_log: str | None = None

    def absolute_name(self) -> str:
        """Return the module of the published extension."""
        return f"deepspeed.ops.{self.name}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the function of this code is available."""
        return self.COMPATIBLE

    def load(self, verbose: bool = True) -> ModuleType:
        """Raise `NotSupportedYet`."""
        raise NotSupportedYet(f"{type(self).__name__}.load: Shoal's native code is called by its optimizers alone")

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Raise `NotSupportedYet`."""
        return self.load(verbose)


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """Return the version of CUDA that torch was built for, (0, 0) for none."""
    import torch

    version = torch.version.cuda
    major, minor = (version or "0.0").split(".")[:2]
    return int(major), int(minor)
