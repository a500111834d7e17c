"""The published pipeline names: schedules as published, topologies and modules with their attributes and errors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from shoal.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from shoal.compat.deepspeed.runtime.pipe import schedule
from shoal.compat.deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from shoal.testing import run_ranks

TRAIN_3_OF_2 = {
    0: ["LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0)", "SendActivation(buffer_id=0)",
        "LoadMicroBatch(buffer_id=1) ForwardPass(buffer_id=1)",
        "RecvGrad(buffer_id=0) SendActivation(buffer_id=1) BackwardPass(buffer_id=0)",
        "LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0)",
        "RecvGrad(buffer_id=1) SendActivation(buffer_id=0) BackwardPass(buffer_id=1)", "",
        "RecvGrad(buffer_id=0) BackwardPass(buffer_id=0) ReduceTiedGrads() ReduceGrads() OptimizerStep()"],
    1: ["", "RecvActivation(buffer_id=0) LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0)", "BackwardPass(buffer_id=0)",
        "SendGrad(buffer_id=0) RecvActivation(buffer_id=1) LoadMicroBatch(buffer_id=1) ForwardPass(buffer_id=1)",
        "BackwardPass(buffer_id=1)",
        "SendGrad(buffer_id=1) RecvActivation(buffer_id=0) LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0)",
        "BackwardPass(buffer_id=0)", "SendGrad(buffer_id=0) ReduceTiedGrads() ReduceGrads() OptimizerStep()"],
}  # fmt: skip
"""The published package's schedule of 3 microbatches over 2 stages, as recorded."""


@pytest.mark.parametrize("stage", [0, 1])
def test_the_train_schedule_is_the_published_one(stage: int) -> None:
    found = schedule.TrainSchedule(micro_batches=3, stages=2, stage_id=stage)
    assert [" ".join(map(repr, step)) for step in found] == TRAIN_3_OF_2[stage]
    assert found.num_pipe_buffers() == 2


@pytest.mark.parametrize("kind", [schedule.TrainSchedule, schedule.InferenceSchedule])
@pytest.mark.parametrize(("microbatches", "stages"), [(1, 1), (2, 3), (5, 4), (8, 2)])
def test_what_a_stage_sends_its_neighbour_receives_in_that_step(kind: Any, microbatches: int, stages: int) -> None:
    ranks = [list(kind(microbatches, stages, stage)) for stage in range(stages)]
    names = ("SendActivation", "RecvActivation", "SendGrad", "RecvGrad")
    counts = [[{op: sum(each.name == op for each in step) for op in names} for step in rank] for rank in ranks]
    for before, after in pairwise(counts):
        for one, other in zip(before, after, strict=True):
            assert one["SendActivation"] == other["RecvActivation"]
            assert one["RecvGrad"] == other["SendGrad"]
    for rank in ranks:
        assert sum(each.name == "ForwardPass" for step in rank for each in step) == microbatches


@pytest.mark.parametrize(("stage", "buffers"), [(0, 4), (1, 3), (2, 2), (3, 2)])
def test_a_stage_has_a_buffer_for_each_microbatch_in_flight(stage: int, buffers: int) -> None:
    assert schedule.TrainSchedule(5, 4, stage).num_pipe_buffers() == buffers
    assert schedule.InferenceSchedule(5, 4, stage).num_pipe_buffers() == 2
    assert schedule.DataParallelSchedule(5, 4, stage).num_pipe_buffers() == 1


def test_a_schedule_and_an_instruction_have_the_published_members() -> None:
    found = schedule.TrainSchedule(4, 2, 1)
    assert (found.stage, found.num_stages, found.num_micro_batches, found.is_first_stage, found.is_last_stage) == (
        1, 2, 4, False, True)
    instruction = schedule.ForwardPass(2, foo=3)
    assert (repr(instruction), instruction.name, vars(instruction)["foo"]) == (
        "ForwardPass(buffer_id=2, foo=3)", "ForwardPass", 3)
    steps = list(schedule.DataParallelSchedule(2, 1, 0))
    assert [[each.name for each in step] for step in steps][1] == [
        "LoadMicroBatch", "ForwardPass", "BackwardPass", "ReduceGrads", "OptimizerStep"]


def test_topologies_raise_the_published_errors() -> None:
    found = ProcessTopology(axes=["a", "b"], dims=[2, 3])
    assert found.mapping[found.get_coord(4)] == 4 and str(found) == str(found.mapping)
    for error, call in ((ValueError, lambda: found.get_rank(a=1)), (AssertionError, lambda: found.get_rank(a=5, b=0)),
                        (ValueError, lambda: found.get_coord(9)), (AttributeError, lambda: found.filter_match(c=1))):
        with pytest.raises(error):
            call()
    assert PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2).get_rank_repr(3) == "model_01"


def test_specs_raise_and_print_as_published() -> None:
    spec = LayerSpec(nn.Linear, 2, 3, bias=False)
    assert repr(spec) == "Linear((2, 3), {'bias': False})" and spec.global_rank == -1
    assert TiedLayerSpec("k", nn.Embedding, 3, 4, tied_weight_attr="weight").tied_weight_attr == ["weight"]
    with pytest.raises(TypeError, match="LayerSpec"):
        LayerSpec(3)


def describe_pipeline() -> dict[str, Any]:
    module = PipelineModule([LayerSpec(nn.Linear, 2, 3), torch.relu, TiedLayerSpec("t", nn.Linear, 3, 3)], num_stages=1,
                            loss_fn=nn.MSELoss())
    grid = module.mpu()
    errors: list[str] = []
    for method in ("profile", "bogus", "type:conv"):
        try:
            PipelineModule([nn.Linear(2, 2)], num_stages=1, partition_method=method)
        except (NotImplementedError, RuntimeError) as error:
            errors.append(type(error).__mro__[1].__name__)
    return {"parts": module.parts, "map": module.fwd_map, "funcs": len(module.forward_funcs),
            "tied": list(module.tied_modules), "path": module.ckpt_layer_path("/x", 2), "errors": errors,
            "owner": module.stage_owner(1), "groups": (grid.dp_group, grid.pp_group, grid.p2p_groups),
            "topology": type(module.topology()).__name__}


def test_a_pipeline_module_has_the_published_members() -> None:
    found, = run_ranks(1, describe_pipeline)
    assert found == {"parts": [0, 3], "map": {"0": 0, "2": 2}, "funcs": 3, "tied": ["t"],
                     "path": "/x/layer_02-model_states.pt", "errors": ["NotSupportedYet", "NotSupportedYet", "ShoalError"],
                     "owner": 0, "groups": ([0], [0], [[0, 0]]), "topology": "ProcessTopology"}
