"""`run_ranks` returns results by rank, and reports failures."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from shoal.testing import RankFailed, run_ranks


def rank_sum() -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("planted")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def test_results_come_back_by_rank() -> None:
    assert run_ranks(4, rank_sum) == [6.0] * 4


def test_the_traceback_of_a_failing_rank_reaches_the_caller() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 raised:(.|\n)*planted"):
        run_ranks(2, fail_on, 1)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1 died"):
        run_ranks(2, die_on, 1)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1e6)


def test_the_stacks_of_ranks_that_do_not_finish_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_TIMEOUT", "2")
    with pytest.raises(RankFailed, match=r"ranks \[1\] did not finish within 2 s\nrank 1:(.|\n)*in hang_on"):
        run_ranks(2, hang_on, 1)
