"""Ranks of tests on the late device: `with ranks_on(prepare)`, or SHOAL_TEST_DEVICE=late for all tests of a run.

SHOAL_TEST_SEED chooses the order of tasks; rank r draws from the seed and r.
"""

from __future__ import annotations

import os

from tests.late.device import seed
from tests.late.group import BACKEND, register

__all__ = ["prepare"]


def prepare() -> str:
    """Load the device in this rank and return the backend of its process groups."""
    register()
    number = int(os.environ.get("SHOAL_TEST_SEED", "0"))
    seed(number and number * 1000 + int(os.environ["RANK"]))
    return BACKEND
