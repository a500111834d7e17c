"""Pipelines: topologies, grids, partitioning, specs, schedules, modules and engines."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from torch import nn

from .case import case, raised

TOPOLOGIES = {
    "2d": lambda: ProcessTopology(axes=["row", "col"], dims=[2, 3]),
    "3d": lambda: ProcessTopology(["a", "b", "c"], [2, 2, 3]),
    "1d": lambda: ProcessTopology(["x"], [4]),
    "pd": lambda: PipeDataParallelTopology(2, 3),
    "pmd": lambda: PipeModelDataParallelTopology(2, 2, 2),
    "ones": lambda: PipeModelDataParallelTopology(1, 1, 4),
}


@case(which=list(TOPOLOGIES))
def topology(which: str) -> Any:
    held = TOPOLOGIES[which]()
    axes = held.get_axis_names()
    coords = [held.get_coord(rank) for rank in range(held.world_size())]
    return [
        list(axes),
        held.world_size(),
        [held.get_dim(axis) for axis in axes],
        held.get_dim("nothing"),
        [list(coord) for coord in coords],
        [held.get_rank(**coord._asdict()) for coord in coords],
        {axis: held.get_axis_comm_lists(axis) for axis in axes},
        held.get_axis_comm_lists("nothing"),
        {axis: [held.get_axis_list(axis, index) for index in range(held.get_dim(axis))] for axis in axes},
        [held.get_rank_repr(rank) for rank in range(held.world_size())],
        held.get_rank_repr(0, omit_axes=[]),
        held.get_rank_repr(held.world_size() - 1, omit_axes=[], inner_sep="+", outer_sep="/"),
        held.filter_match(**{axes[0]: 0}),
    ]


@case(call=["missing", "extra", "outside", "coord", "axis_list"])
def topology_refuses(call: str) -> Any:
    held = ProcessTopology(["a", "b"], [2, 2])
    calls: dict[str, Any] = {
        "missing": lambda: held.get_rank(a=0),
        "extra": lambda: held.get_rank(a=0, b=0, c=1),
        "outside": lambda: held.get_rank(a=2, b=0),
        "coord": lambda: held.get_coord(4),
        "axis_list": lambda: held.get_axis_list("z", 0),
    }
    return raised(calls[call])


@case(ranks=4, which=["pd", "pmd"])
def grid(which: str) -> Any:
    deepspeed.init_distributed("gloo")
    held = PipelineParallelGrid(
        topology=PipeDataParallelTopology(2, 2) if which == "pd" else PipeModelDataParallelTopology(2, 2, 1)
    )
    return [
        held.get_global_rank(),
        held.get_stage_id(),
        held.get_data_parallel_id(),
        held.get_pipe_parallel_rank(),
        held.get_pipe_parallel_world_size(),
        held.get_data_parallel_rank(),
        held.get_data_parallel_world_size(),
        held.get_model_parallel_rank(),
        held.get_model_parallel_world_size(),
        held.get_slice_parallel_rank(),
        held.get_slice_parallel_world_size(),
        held.stage_to_global(0),
        held.stage_to_global(1),
        held.pipe_parallel_size,
        held.data_parallel_size,
        held.model_parallel_size,
        held.slice_parallel_size,
        list(held.pp_group),
        list(held.dp_group),
        [list(pair) for pair in held.p2p_groups],
        held.topology().world_size(),
        held.is_first_stage if isinstance(getattr(held, "is_first_stage", None), bool) else None,
        held.get_tensor_model_parallel_world_size(),
        held.get_pipeline_model_parallel_world_size(),
        torch.distributed.get_world_size(held.get_data_parallel_group()),
        torch.distributed.get_world_size(held.get_pipe_parallel_group()),
        torch.distributed.get_world_size(held.get_model_parallel_group()),
    ]


@case(ranks=4)
def grid_from_a_group() -> Any:
    deepspeed.init_distributed("gloo")
    held = PipelineParallelGrid(process_group=torch.distributed.new_group(ranks=list(range(4))))
    return [held.get_data_parallel_world_size(), held.get_pipe_parallel_world_size()]


WEIGHTS = [
    [1, 1, 1, 1],
    [1, 2, 3, 4],
    [5, 1, 1, 1, 1],
    [1] * 7,
    [0, 0, 5, 0],
    [3, 1, 4, 1, 5, 9, 2, 6],
    [10],
    [1, 1],
    [2, 2, 2, 2, 2, 2, 2, 10],
    [1, 1, 1, 10, 1, 1, 1],
]


@case(weights=WEIGHTS, parts=[1, 2, 3, 4])
def balanced(weights: list[int], parts: int) -> Any:
    return [
        [int(each) for each in borders]
        for borders in (partition_balanced(weights, parts), partition_uniform(len(weights), parts))
    ]


GRIDS = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (3, 3), (4, 3), (4, 8), (3, 1), (4, 4)]


@case(sizes=GRIDS, kind=["TrainSchedule", "InferenceSchedule"])
def schedules(sizes: tuple[int, int], kind: str) -> Any:
    stages, count = sizes
    found: list[Any] = []
    for stage in range(stages):
        held = getattr(schedule, kind)(micro_batches=count, stages=stages, stage_id=stage)
        found.append(
            [
                held.num_pipe_buffers(),
                held.stage,
                held.num_stages,
                held.num_micro_batches,
                held.is_first_stage,
                held.is_last_stage,
                [[[command.name, command.kwargs] for command in tick] for tick in held],
            ]
        )
    return found


@case(count=[1, 2, 5])
def data_parallel_schedule(count: int) -> Any:
    held = schedule.DataParallelSchedule(micro_batches=count, stages=1, stage_id=0)
    return [held.num_pipe_buffers(), [[repr(command) for command in tick] for tick in held]]


@case()
def instructions() -> Any:
    made = [
        schedule.ForwardPass(buffer_id=1),
        schedule.OptimizerStep(),
        schedule.SendGrad(buffer_id=0),
        schedule.LoadMicroBatch(2),
        schedule.PipeInstruction(a=1),
    ]
    return [
        [repr(one) for one in made],
        made[0].buffer_id,
        made[0].name,
        [kind.__mro__[1].__name__ for kind in map(type, made)],
        schedule.ForwardPass(buffer_id=1) == schedule.ForwardPass(buffer_id=1),
    ]


@case()
def layer_specs() -> Any:
    spec = LayerSpec(nn.Linear, 3, 2, bias=False)
    built = spec.build()
    tied = TiedLayerSpec("embed", nn.Embedding, 4, 2, forward_fn=None, tied_weight_attr="weight")
    return [
        repr(spec),
        list(built.weight.shape),
        built.bias,
        raised(lambda: LayerSpec(int, 3)),
        raised(lambda: LayerSpec(lambda x: x)),
        tied.key,
        tied.tied_weight_attr,
        type(tied.build()).__name__,
    ]


class Block(nn.Linear):
    """A layer with a name of its own."""


def layers(count: int = 4) -> list[Any]:
    return [LayerSpec(nn.Linear, 4, 4) if index % 2 == 0 else LayerSpec(Block, 4, 4) for index in range(count)]


@case(
    ranks=2, method=["uniform", "parameters", "type:block", "type:Linear", "PARAMETERS", "type:nothing", "profile", "else"]
)
def partition_methods(method: str) -> Any:
    deepspeed.init_distributed("gloo")
    held: list[Any] = []

    def build() -> None:
        held.append(
            PipelineModule(
                [LayerSpec(nn.Linear, 4, 64), LayerSpec(Block, 64, 4), *layers(4)], num_stages=2, partition_method=method
            )
        )

    failed = raised(build)
    return (
        failed
        if failed["raised"]
        else [list(held[0].parts), held[0].stage_owner(0), held[0].stage_owner(5), held[0].num_pipeline_stages()]
    )


@case(ranks=2)
def module_surface() -> Any:
    deepspeed.init_distributed("gloo")
    held = PipelineModule(
        [LayerSpec(nn.Linear, 4, 4), nn.functional.relu, nn.Linear(4, 4), LayerSpec(nn.Linear, 4, 2)],
        num_stages=2,
        loss_fn=nn.MSELoss(),
        seed_layers=True,
        base_seed=7,
    )
    return [
        sorted(name for name, _ in held.named_parameters()),
        len(held.forward_funcs),
        held._local_start,
        held._local_stop,
        held.topology().get_axis_names(),
        held.ckpt_prefix("dir", "tag"),
        held.ckpt_layer_path("dir", held._local_start),
        held.mpu().get_data_parallel_world_size(),
        held.get_additional_losses(),
        [float(p.sum()) for p in held.parameters()],
    ]


@case(wrong=["none", "world", "spec", "nested"], ranks=2)
def module_refuses(wrong: str) -> Any:
    deepspeed.init_distributed("gloo")
    calls: dict[str, Any] = {
        "none": lambda: PipelineModule(layers()),
        "world": lambda: PipelineModule(layers(), num_stages=3),
        "spec": lambda: PipelineModule([LayerSpec(int, 3), *layers()], num_stages=2),
        "nested": lambda: PipelineModule([PipelineModule(layers(), num_stages=2), *layers()], num_stages=2),
    }
    return raised(calls[wrong])


def seeded(method: str = "uniform", stages: int = 2, **more: Any) -> PipelineModule:
    return PipelineModule(
        [LayerSpec(nn.Linear, 4, 4), nn.Tanh(), LayerSpec(nn.Linear, 4, 4), nn.ReLU(), LayerSpec(nn.Linear, 4, 2)],
        num_stages=stages,
        loss_fn=nn.MSELoss(),
        partition_method=method,
        seed_layers=True,
        base_seed=3,
        **more,
    )


def batches(count: int, size: int = 2) -> Any:
    draw = torch.Generator().manual_seed(5 + torch.distributed.get_rank() % 1)
    return iter([(torch.randn(size, 4, generator=draw), torch.randn(size, 2, generator=draw)) for _ in range(count)])


def pipe_config(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        **more,
    }


@case(ranks=2, stage=[0, 1], stages=[1, 2], checkpointed=[0, 1], reentrant=[True, False])
def trained(stage: int, stages: int, checkpointed: int, reentrant: bool) -> Any:
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        model=seeded(stages=stages, activation_checkpoint_interval=checkpointed),
        config=pipe_config(stage, pipeline={"use_reentrant": reentrant}),
    )
    losses = [engine.train_batch(batches(2)) for _ in range(3)]
    return [
        [float(loss) for loss in losses],
        float(engine.eval_batch(batches(2))),
        engine.global_steps,
        engine.is_first_stage(),
        engine.is_last_stage(),
        engine.stage_id,
        engine.num_stages,
        engine.micro_batches,
        engine.train_batch_size(),
    ]


@case(ranks=2)
def eval_forms() -> Any:
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=seeded(), config=pipe_config())
    loss, logits = engine.eval_batch(batches(2), return_logits=True)
    return [
        float(loss),
        logits
        if logits is None
        else [list(each.shape) for each in (logits if isinstance(logits, list | tuple) else [logits])],
        float(engine.eval_batch(batches(2), reduce_output="avg")),
    ]


@case(ranks=2)
def pipe_engine_refuses() -> Any:
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=seeded(), config=pipe_config())

    def frozen() -> None:
        with torch.no_grad():
            engine.train_batch(batches(2))

    return [
        raised(lambda: engine.forward(torch.ones(1))),
        raised(lambda: engine.backward(torch.ones(1))),
        raised(engine.step),
        raised(frozen),
    ]


@case(ranks=2, stage=[2, 3])
def pipe_and_zero(stage: int) -> Any:
    deepspeed.init_distributed("gloo")
    return raised(lambda: deepspeed.initialize(model=seeded(), config=pipe_config(stage)))


@case(ranks=2)
def pipe_with_an_mpu() -> Any:
    deepspeed.init_distributed("gloo")
    model = seeded()
    return raised(lambda: deepspeed.initialize(model=model, config=pipe_config(), mpu=model.mpu()))


@case(ranks=2)
def pipe_batch_size_changes() -> Any:
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=seeded(), config=pipe_config())
    engine.set_train_batch_size(8)
    return [
        engine.gradient_accumulation_steps(),
        engine.train_batch_size(),
        engine.micro_batches,
        float(engine.train_batch(batches(4))),
        raised(lambda: engine.set_train_batch_size(7)),
    ]


@case(ranks=2)
def pipe_iterators() -> Any:
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        model=seeded(), config=pipe_config(), training_data=[(torch.randn(4), torch.randn(2)) for _ in range(8)]
    )
    first = float(engine.train_batch()) > 0
    engine.set_dataiterator(batches(4))
    engine.set_batch_fn(lambda batch: batch)
    second = float(engine.train_batch()) > 0
    return [first, second]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given @ self.weight


@case(ranks=2, stages=[1, 2])
def tied_layers(stages: int) -> Any:
    deepspeed.init_distributed("gloo")
    model = PipelineModule(
        [
            TiedLayerSpec("w", Tied),
            LayerSpec(nn.Linear, 4, 4),
            nn.Tanh(),
            TiedLayerSpec("w", Tied, forward_fn=lambda module, given: given @ module.weight.t()),
            LayerSpec(nn.Linear, 4, 2),
        ],
        num_stages=stages,
        loss_fn=nn.MSELoss(),
        seed_layers=True,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=model, config=pipe_config())
    losses = [float(engine.train_batch(batches(2))) for _ in range(3)]
    return [
        losses,
        sorted(model.tied_modules.keys()),
        [float(module.weight.sum()) for module in model.tied_modules.values()],
        sorted(model.tied_comms),
    ]


@case(ranks=2)
def pipe_checkpoint() -> Any:
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=seeded(), config=pipe_config())
    engine.train_batch(batches(2))
    engine.save_checkpoint("saved", tag="one")
    expected = float(engine.train_batch(batches(2)))
    again, *_ = deepspeed.initialize(model=seeded(), config=pipe_config())
    path, _ = again.load_checkpoint("saved", tag="one")
    return [path is not None, abs(float(again.train_batch(batches(2))) - expected) < 1e-6, again.global_steps]
