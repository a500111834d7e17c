"""Settings of every test: one thread a process, generous limits of time, and a default SIGINT handler.

Ranks and the reference process sum in the same order only with the same number of threads, and more threads than cores
slow each other down.
"""

import os
import signal
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that a test starts
os.environ.setdefault("SHOAL_TEST_TIMEOUT", "300")  # a busy machine is no failure

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shoal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shoal")

# A shell starts background jobs with SIGINT ignored, and what they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def test_device() -> Iterator[None]:
    """Put the ranks of `run_ranks` on the device that SHOAL_TEST_DEVICE names: `late`, else the CPU."""
    if os.environ.get("SHOAL_TEST_DEVICE", "cpu") != "late":
        yield
        return
    from shoal.testing import ranks_on
    from tests.late.ranks import prepare

    with ranks_on(prepare):
        yield
