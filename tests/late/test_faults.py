"""The late device finds missing waits: a planted fault gives wrong numbers or an error, and Shoal as it is the right ones.

SHOAL_TEST_SEED is the first of the seeds.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch import Tensor

from shoal.testing import RankFailed, ranks_on, run_ranks
from tests.late.faults import FAULTS, Fault
from tests.late.programs import PROGRAMS, first_wrong, numbers
from tests.late.ranks import prepare

SEEDS = range(int(os.environ.get("SHOAL_TEST_SEED", "0")), int(os.environ.get("SHOAL_TEST_SEED", "0")) + 50)


@functools.cache
def right(name: str) -> list[list[Tensor]]:
    """Return what a program computes on the late device with seed 0, by rank."""
    with ranks_on(prepare):
        return run_ranks(PROGRAMS[name].ranks, numbers, name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_same_bits_with_every_seed(name: str) -> None:
    """And the CPU's numbers, up to the rounding of kernels that only the CPU or only a device has."""
    ranks, expected = PROGRAMS[name].ranks, right(name)
    on_host = run_ranks(ranks, numbers, name) if PROGRAMS[name].has_host_numbers else expected
    for one, other in zip(expected, on_host, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with ranks_on(prepare):
        assert run_ranks(ranks, first_wrong, name, expected, SEEDS[1:3]) == [None] * ranks


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_removed_wait_is_found(fault: Fault) -> None:
    ranks, expected = PROGRAMS[fault.program].ranks, right(fault.program)
    with ranks_on(prepare):
        try:
            found = run_ranks(ranks, first_wrong, fault.program, expected, SEEDS, fault.name)
        except RankFailed as error:
            if "FaultRaised" not in str(error):  # it was not planted, or the program did not end
                raise
            return
    assert None not in found, f"{fault.where}: without {fault.removes!r} the numbers are right in {len(SEEDS)} seeds"
