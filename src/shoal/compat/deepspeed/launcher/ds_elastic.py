"""The command `ds_elastic`: the sizes at which an elastic job may run."""

from __future__ import annotations

import sys

__all__ = ["command"]


def command() -> int:
    """Say that elasticity is not supported yet, and return exit code 2."""
    sys.stderr.write("ds_elastic: the section 'elasticity' is not supported yet. `shoal run --nodes A:B --max-restarts K` "
                     "restarts a job on another number of nodes, and its checkpoints load at any size\n")
    return 2
