"""The published pipeline names: schedules as published, topologies and modules with their attributes and errors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from shoal.compat.deepspeed.runtime.pipe import p2p, schedule
from shoal.compat.deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from shoal.compat.entry import initialize
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
    assert found == {"parts": [0, 3], "map": {"0": 0}, "funcs": 3, "tied": ["t"],
                     "path": "/x/layer_02-model_states.pt", "errors": ["NotSupportedYet", "NotSupportedYet", "ShoalError"],
                     "owner": 0, "groups": ([0], [0], [[0, 0]]), "topology": "PipeDataParallelTopology"}


class Words(nn.Module):
    """An embedding whose positions the head does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).view(6, 2))
        self.positions = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("order", torch.arange(3))

    def forward(self, words: Tensor) -> Tensor:
        return self.weight[words] + self.positions[self.get_buffer("order")]


def scores(words: Words, hidden: Tensor) -> Tensor:
    return hidden @ words.weight.t()


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def texts(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(count):
        words = (torch.arange(6).view(2, 3) + step) % 6
        yield words, (words + 1) % 6


def tied_engine(stages: int) -> Any:
    layers = [TiedLayerSpec("words", Words), LayerSpec(nn.Linear, 2, 2), torch.tanh,
              TiedLayerSpec("words", Words, forward_fn=scores)]
    module = PipelineModule(layers, num_stages=stages, loss_fn=loss_of, partition_method="uniform", seed_layers=True)
    return initialize(model=module, config={"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
                                            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
                                            "zero_optimization": {"stage": 1}})[0]


def trained(stages: int, folder: str) -> dict[str, Any]:
    engine = tied_engine(stages)
    module = engine.module
    losses = [float(engine.train_batch(texts(2))) for _ in range(2)]
    engine.save_checkpoint(folder, tag="t")
    module.save_state_dict(f"{folder}/t", engine.checkpoint_engine)
    return {"losses": losses, "weights": {name: each.detach().clone() for name, each in module.named_parameters()},
            "state": list(module.state_dict()), "comms": {
                key: (comm["ranks"], comm["weight_attr"], comm["module"] is module.tied_modules[key])
                for key, comm in module.tied_comms.items()}}


def resumed(folder: str) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []
    for by_layer in (False, True):
        engine = tied_engine(1)
        if by_layer:
            engine.module.load_state_dir(f"{folder}/t", engine.checkpoint_engine)
        else:
            engine.load_checkpoint(folder, tag="t")
        found.append({name: each.detach().clone() for name, each in engine.module.named_parameters()})
    return found


def test_every_division_trains_and_saves_the_same_tied_model(tmp_path: Path) -> None:
    whole, = run_ranks(1, trained, 1, str(tmp_path / "whole"))
    first, last = run_ranks(2, trained, 2, str(tmp_path / "halves"))
    shared = ["tied_modules.words.weight", "tied_modules.words.positions"]
    assert list(whole["weights"]) == list(first["weights"]) == [*shared, "1.weight", "1.bias"]
    assert (list(last["weights"]), last["state"]) == (shared, [*shared, "tied_modules.words.order"])
    assert (whole["comms"], last["comms"]) == ({}, {"words": ([0, 1], ["weight"], True)})
    assert whole["losses"] == pytest.approx(first["losses"], rel=1e-6) and whole["losses"][1] < whole["losses"][0]
    for found in (first["weights"], last["weights"], *run_ranks(1, resumed, str(tmp_path / "halves"))[0]):
        for name, value in found.items():
            torch.testing.assert_close(value, whole["weights"][name])


class Two(nn.Linear):
    """Another class than `nn.Linear`, of the same parameters."""


def tied_of_two_classes() -> dict[str, Any]:
    module = PipelineModule([TiedLayerSpec("t", nn.Linear, 3, 3), TiedLayerSpec("t", Two, 3, 3)], num_stages=1)
    first, second = module.forward_funcs
    return {"names": [name for name, _ in module.named_parameters()], "same": first is second,
            "weight": module.get_parameter("0.weight") is module.get_parameter("1.weight")}


def test_tied_layers_of_two_classes_share_only_the_named_weights() -> None:
    assert run_ranks(1, tied_of_two_classes) == [{"names": ["0.weight", "0.bias", "1.bias"], "same": False, "weight": True}]


def gradients_of_tied_weights() -> list[float]:
    module = PipelineModule([TiedLayerSpec("t", nn.Linear, 2, 2), nn.Tanh(), TiedLayerSpec("t", nn.Linear, 2, 2)],
                            num_stages=2, partition_method=[0, 1, 3])
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + module.stage_id)
    module.allreduce_tied_weight_gradients()
    (weight, _), = module.get_tied_weights_and_groups()
    assert weight is module.get_parameter("tied_modules.t.weight")
    return [float(each.grad.flatten()[0]) for each in module.parameters() if each.grad is not None]


def test_scripts_can_sum_the_gradients_of_tied_weights() -> None:
    assert run_ranks(2, gradients_of_tied_weights) == [[3.0, 1.0], [3.0, 2.0]]


def published_engine() -> dict[str, Any]:
    module = PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.MSELoss())
    engine = initialize(model=module, config={"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
                                              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})[0]
    with torch.no_grad():
        module.get_parameter("0.weight").copy_(torch.eye(2))
        module.get_parameter("0.bias").zero_()

    def data(count: int = 2) -> Iterator[Any]:
        return iter([(torch.full((1, 2), 1.0 + each), torch.zeros(1, 2)) for each in range(count)])

    outputs = engine.eval_batch(data(), compute_loss=False)
    loss, last = engine.eval_batch(data(), return_logits=True)
    evaluating = module.training
    raised: list[str] = []
    for error, call in ((StopIteration, lambda: engine.train_batch(data(1))),
                        (NotImplementedError, lambda: engine.eval_batch(data(), reduce_output="sum"))):
        with pytest.raises(error) as found:
            call()
        raised.append(type(found.value).__name__)
    engine.train_batch(data())
    return {"outputs": outputs.tolist(), "last": (float(loss), last.tolist()), "modes": (evaluating, module.training),
            "raised": raised, "grid": engine.grid is engine.mpu is module.mpu(),
            "stages": (engine.prev_stage, engine.next_stage),
            "sizes": (engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel, engine.micro_batch_size),
            "list": len(engine.eval_batch(data(), compute_loss=False, reduce_output=None))}


def test_a_pipeline_engine_evaluates_and_raises_as_published() -> None:
    found, = run_ranks(1, published_engine)
    assert found == {"outputs": [[1.5, 1.5]], "last": (2.5, [[2.0, 2.0]]), "modes": (False, True),
                     "raised": ["DataEnded", "_NoSuchReduction"], "grid": True, "stages": (-1, 1),
                     "sizes": (False, False, False, 1), "list": 2}


def exchange_object() -> Any:
    if dist.get_rank() == 0:
        p2p.send_obj({"step": 3, "shapes": [torch.ones(2)]}, 1)
        return None
    return p2p.recv_obj(0)


def test_an_object_is_sent_to_a_rank() -> None:
    sent, received = run_ranks(2, exchange_object)
    assert sent is None and received["step"] == 3 and torch.equal(received["shapes"][0], torch.ones(2))


def bf16_pipeline() -> str:
    module = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 1)], num_stages=1, loss_fn=nn.MSELoss())
    _, optimizer, *_ = initialize(model=module, config={
        "train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}})
    return type(optimizer).__name__


def test_the_optimizer_of_a_bf16_pipeline_is_of_the_published_class() -> None:
    assert run_ranks(1, bf16_pipeline) == ["BF16_Optimizer"]
