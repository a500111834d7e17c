"""Where tests run, and how near to each other results of two tiers are there."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["DEVICE", "TIERS_AGREE"]

DEVICE: Final = os.environ.get("SHOAL_TEST_DEVICE", "cpu")
"""What the ranks of tests compute on."""

TIERS_AGREE: Final = {"rtol": 0.0, "atol": 0.0} if DEVICE == "cpu" else {"rtol": 1e-3, "atol": 1e-4}
"""For `assert_close`: one kernel steps every tier on the CPU; a device steps what it holds with its own kernel."""
