"""Settings of every test: one thread a process, generous limits of time, and a default SIGINT handler.

Ranks and the reference process sum in the same order only with the same number of threads, and more threads than cores
slow each other down.
"""

import logging
import os
import signal
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that a test starts
os.environ.setdefault("SHOAL_TEST_TIMEOUT", "300")  # a busy machine is no failure

import pytest
from hypothesis import HealthCheck, settings

from tests.devices import DEVICE

settings.register_profile("shoal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shoal")

# A shell starts background jobs with SIGINT ignored, and what they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip, on another device than the CPU, a test whose ranks were told that the device does not do what it tests."""
    try:
        return (yield)
    except AssertionError as error:
        refused = [line for line in str(error).splitlines() if "shoal.errors.NotSupportedYet: " in line]
        if DEVICE == "cpu" or not refused:
            raise
        pytest.skip(f"on {DEVICE}: {refused[-1]}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the share of the tests that SHOAL_TEST_SHARE asks for, drawn by the seed, and skip what is the CPU's alone."""
    share, seed = int(os.environ.get("SHOAL_TEST_SHARE", "1")), int(os.environ.get("SHOAL_TEST_SEED", "0"))
    if share > 1:
        items[:] = items[seed % share::share]
    for item in items:
        mark = item.get_closest_marker("host")
        if DEVICE != "cpu" and mark is not None:
            item.add_marker(pytest.mark.skip(reason=f"the CPU's alone: {mark.args[0]}"))


@pytest.fixture(autouse=True)
def own_log_level() -> Iterator[None]:
    """Give the logger its level back: an engine that a test builds in pytest's own process sets that of its key."""
    logger = logging.getLogger("shoal")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module", autouse=True)
def ended_process_group() -> Iterator[None]:
    """End the process group that a file's tests began in pytest's own process: the files that follow begin without one."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def test_device() -> Iterator[None]:
    """Put the ranks of `run_ranks` on the device that SHOAL_TEST_DEVICE names: `late` or `cuda`, else on the CPU."""
    if DEVICE == "cpu":
        yield
        return
    from shoal.testing import ranks_on
    from tests.late.ranks import PRELOADED_ON, SUITES_ON

    with ranks_on(SUITES_ON[DEVICE], PRELOADED_ON[DEVICE]):
        yield
