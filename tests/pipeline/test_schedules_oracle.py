"""The order of GPipe, 1F1B and interleaved 1F1B is that of torch.distributed.pipelining; ZB-V is never slower than torch's.

torch's schedules run on mock stages that record their calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from shoal.pipeline.check import simulate
from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.schedules import PipelineSchedule, make_schedule

RANKS = range(1, 9)
KINDS = {"FORWARD": Op.FORWARD, "FULL_BACKWARD": Op.BACKWARD, "BACKWARD_INPUT": Op.INPUT,
         "BACKWARD_WEIGHT": Op.WEIGHT}


def stage_of(index: int, stages: int, rank: int, ranks: int, calls: list[Instruction] | None = None) -> Mock:
    """Return a mock stage that records its calls in `calls`."""
    def recorder(kind: Op) -> Callable[..., None]:
        return lambda microbatch, *_, **__: None if calls is None else calls.append(Instruction(index, kind, microbatch))

    stage = Mock(stage_index=index, num_stages=stages, group_rank=rank, group_size=ranks, is_first=index == 0,
                 is_last=index == stages - 1, has_backward=True, device="cpu")
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    stage.forward_one_chunk.side_effect = recorder(Op.FORWARD)
    stage.backward_one_chunk.side_effect = recorder(Op.BACKWARD)
    return stage


def run_loop(torch_schedule: type, rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
    """Return the calls of a schedule with one stage per rank; only its run loop defines its order."""
    calls: list[Instruction] = []
    schedule = torch_schedule(stage_of(rank, ranks, rank, ranks, calls), microbatches)
    schedule._initialize_stage = lambda *_, **__: None
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return tuple(calls)


def planned(torch_schedule: type, owner: tuple[int, ...], microbatches: int) -> tuple[tuple[Instruction, ...], ...]:
    """Return the rows that a schedule with several stages per rank plans."""
    ranks = max(owner) + 1
    mine = [stage_of(index, len(owner), 0, ranks) for index, rank in enumerate(owner) if rank == 0]
    order = torch_schedule(mine, microbatches).pipeline_order
    return tuple(tuple(Instruction(action.stage_index, KINDS[action.computation_type.name], action.microbatch_index)
                       for action in order[rank] if action is not None and action.computation_type.name in KINDS)
                 for rank in range(ranks))


@pytest.mark.parametrize(("name", "torch_schedule"), [
    ("gpipe", torch_schedules.ScheduleGPipe), ("1f1b", torch_schedules.Schedule1F1B)])
def test_gpipe_and_1f1b_run_in_torchs_order(name: str, torch_schedule: type) -> None:
    for ranks in RANKS:
        for microbatches in range(ranks, 21):  # torch refuses fewer microbatches than ranks
            rows = make_schedule(name, ranks=ranks, microbatches=microbatches).rows
            assert rows == tuple(run_loop(torch_schedule, rank, ranks, microbatches) for rank in range(ranks))


@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
def test_interleaved_runs_in_torchs_order(stages_per_rank: int) -> None:
    compared = 0
    for ranks in RANKS:
        for microbatches in range(1, 21):
            if microbatches % max(1, microbatches // ranks):
                continue  # torch refuses what does not divide into its rounds
            schedule = make_schedule("interleaved", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
            assert schedule.rows == planned(torch_schedules.ScheduleInterleaved1F1B, schedule.owner, microbatches)
            compared += 1
    assert compared > 80


def test_interleaved_allows_microbatches_that_torch_refuses() -> None:
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        planned(torch_schedules.ScheduleInterleaved1F1B, (0, 1, 2, 3) * 2, 9)
    make_schedule("interleaved", ranks=4, microbatches=9, stages_per_rank=2)


def test_zbv_is_never_slower_than_torchs_nor_holds_more() -> None:
    faster = 0
    for ranks in range(2, 9):
        for microbatches in range(1, 21):
            ours = make_schedule("zbv", ranks=ranks, microbatches=microbatches)
            theirs: PipelineSchedule = replace(
                ours, rows=planned(torch_schedules.ScheduleZBVZeroBubble, ours.owner, microbatches))
            assert simulate(ours).makespan <= simulate(theirs).makespan
            assert max(ours.peak_activations) <= 2 * ranks
            faster += simulate(ours).makespan < simulate(theirs).makespan
    assert faster
