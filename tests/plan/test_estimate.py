"""The estimators agree with the formulas they document, and with DeepSpeed's published numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.plan import WorkingMemory, estimate, estimate_working_memory
from shoal.zero.memory_needs import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from shoal.zero.reducer import IN_FLIGHT

P, L = 1_000_003, 70_001


class Tied(nn.Module):
    """A frozen layer, and two trainable ones that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(10, 10, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight


@pytest.mark.parametrize(("stage", "total"), [(0, 16), (1, 2 + 2 + 3), (2, 2 + 3.5), (3, 4)])
def test_sixteen_bit_training_on_four_ranks_costs_what_the_zero_paper_says(stage: int, total: float) -> None:
    (row,) = estimate(4000, 4, stages=[stage], compute=torch.bfloat16).rows
    assert row.total == total * 4000


def test_fp32_weights_are_their_own_master() -> None:
    (row,) = estimate(1000, 2, stages=[1]).rows
    assert (row.weight, row.gradient, row.master, row.moments) == (4000, 4000, 0, 4000)


def test_gradients_rest_in_the_accumulation_dtype() -> None:
    (row,) = estimate(1000, 2, stages=[2], compute=torch.bfloat16, accumulate=torch.float32).rows
    assert row.gradient == 2000


def test_an_optimizer_without_moments_costs_no_moments() -> None:
    assert [row.moments for row in estimate(1000, 2, moments=0).rows] == [0, 0, 0, 0]


def test_a_live_model_counts_tied_weights_once_and_frozen_ones_as_weights() -> None:
    result = estimate(Tied(), 1, stages=[0])
    assert (result.trainable, result.frozen) == (72, 100)
    (row,) = result.rows
    assert (row.weight, row.gradient, row.moments) == (172 * 4, 72 * 4, 2 * 72 * 4)


def test_a_model_on_the_meta_device_is_estimated_like_a_real_one() -> None:
    with torch.device("meta"):
        model = Tied()
    assert estimate(model, 4) == estimate(Tied(), 4)


def test_the_table_has_a_row_for_each_number_of_ranks_and_stage() -> None:
    result = estimate(30_000_000, (1, 2, 4))
    assert [(row.ranks, row.stage) for row in result.rows] == [(n, s) for n in (1, 2, 4) for s in range(4)]
    text = str(result)
    assert "30,000,000 parameters, float32" in text
    assert "457.8 MiB" in text  # stage 0: 16 bytes a parameter


@pytest.mark.parametrize("count", [-1, -30])
def test_a_negative_count_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=rf"model: got {count} parameters; a count is 0 or more"):
        estimate(count, 2)


@pytest.mark.parametrize("ranks", [0, (), (2, 0)])
def test_less_than_one_rank_is_refused(ranks: int | tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"ranks: got .*; give one or more numbers of at least 1"):
        estimate(10, ranks)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(UsageError, match=r"stages: got 4; choose from 0, 1, 2, 3"):
        estimate(10, 2, stages=[1, 4])


@pytest.mark.parametrize(("gpus", "nodes", "offload", "factor", "expected"), [
    (1, 1, True, 1.5, (24000072, 2000006)),
    (8, 3, True, 1.0, (96000288, 2000006)),
    (1, 3, False, 1.5, (6000018, 8000024)),
    (8, 1, False, 1.0, (32000096, 4250012)),
])
def test_stage_2_answers_deepspeeds_numbers(gpus: int, nodes: int, offload: bool, factor: float,
                                            expected: tuple[int, int]) -> None:
    assert estimate_zero2_model_states_mem_needs(P, gpus, nodes, offload, factor) == expected


@pytest.mark.parametrize(("gpus", "nodes", "optimizer", "weights", "init", "expected"), [
    (8, 1, True, True, True, (27000081, 280004, 280004)),
    (8, 1, True, True, False, (48000144, 280004, 280004)),
    (1, 3, True, False, True, (8000024, 946672, 280004)),
    (8, 3, True, False, False, (48000144, 363337, 280004)),
    (8, 3, False, False, True, (3360048, 1030006, 280004)),
    (1, 1, False, False, False, (6000018, 18280058, 280004)),
])
def test_stage_3_answers_deepspeeds_numbers(gpus: int, nodes: int, optimizer: bool, weights: bool, init: bool,
                                            expected: tuple[int, int, int]) -> None:
    assert estimate_zero3_model_states_mem_needs(P, L, gpus, nodes, optimizer, weights, init) == expected


def test_the_stage_2_tables_of_a_live_and_a_cold_model_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero2_model_states_mem_needs_all_live(nn.Linear(100, 100), 8, 2)
    live = capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_cold(10_100, 8, 2)
    assert live == capsys.readouterr().out
    assert "offload_optimizer=cpu" in live
    assert "offload_optimizer=none" in live


def test_the_stage_3_tables_of_a_live_and_a_cold_model_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero3_model_states_mem_needs_all_live(nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10)), 8, 2)
    live = capsys.readouterr().out
    estimate_zero3_model_states_mem_needs_all_cold(11_110, 10_100, 8, 2)
    assert live == capsys.readouterr().out
    assert live.count("zero_init=1") == 3
    assert live.count("zero_init=0") == 3


def test_an_estimate_tells_what_rests_on_which_device() -> None:
    (row,) = estimate(1000, 1, stages=[3], compute=torch.bfloat16, offload_param="cpu", offload_optimizer="nvme").rows
    assert (row.on("none"), row.on("cpu"), row.on("nvme")) == (0, 2000, 14000)
    (row,) = estimate(1000, 1, stages=[2], offload_optimizer="cpu").rows
    assert (row.on("none"), row.on("cpu")) == (4000, 12000)


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="estimate: offload_param: got 'disk'; choose 'none', 'cpu' or 'nvme'"):
        estimate(10, 1, offload_param="disk")


def working(stage: int, ranks: int = 1, **more: Any) -> WorkingMemory:
    return estimate_working_memory([100, 300, 200], stage, ranks, compute=torch.bfloat16, accumulate=torch.float32, **more)


def test_working_memory_is_the_window_the_pool_and_the_pieces() -> None:
    assert working(0) == WorkingMemory(weights=0, gradients=0, pool=0, step=0)
    assert working(3).pool == 0, "one rank: gradients rest where they are collected"
    assert working(3, 2).pool == 300 * 4 * (1 + 2 * IN_FLIGHT), "two: the one that is collected, and those that travel"
    assert working(3, weights_offloaded=True, window=2).weights == 500 * 2, "the two largest that follow each other"
    assert working(3, 2).weights == 500 * 2, "sharded weights are gathered"
    away = working(3, state_offloaded=True, chunks=2, chunk=50, write_ahead=10**9)
    assert away.step == 2 * 50 * (8 + 4 + 4 + 2), "moments, gradient, master and rounded weight"
    assert away.gradients == 600 * 4, "all gradients wait to be written"
    assert away.total == away.pool + max(away.gradients, away.step)
    assert working(3, state_offloaded=True, write_ahead=400).gradients == 400 + 300 * 4, "written, and collected"


def test_where_backward_steps_gradients_wait_beside_the_pieces() -> None:
    there = working(3, state_offloaded=True, chunks=2, chunk=50, write_ahead=800, in_backward=True)
    assert there.gradients == 300 * 4 + 300 * 4, "one that may wait, as it is alone, and one that waits for room"
    assert there.total == there.pool + there.gradients + there.step
    units, wide = [100, 300, 200], torch.float32
    own = estimate_working_memory(units, 3, 2, compute=wide, accumulate=wide, weights_offloaded=True, state_offloaded=True,
                                  write_ahead=1, in_backward=True)
    assert own.gradients == 2 * 150 * (4 + 4), "weights that are their own master wait with it"
