"""ZeRO: training at every stage, the engine's answers, averaging, loaders, estimators, tiles, leaves, offloaded state."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from .case import case, raised

ADAM = {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}}


def network(*, bias: bool = True, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 1))
    if frozen:
        for parameter in model[2].parameters():
            parameter.requires_grad_(False)
    return model


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        "optimizer": ADAM,
        **more,
    }


def start(stage: int, model: nn.Module | None = None, **more: Any) -> Any:
    deepspeed.init_distributed("gloo")
    return deepspeed.initialize(model=network() if model is None else model, config=config(stage, **more))[0]


def batch(index: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(index * 10 + torch.distributed.get_rank())
    return torch.randn(2, 4, generator=draw).to(dtype)


def train(engine: Any, steps: int = 3, dtype: torch.dtype = torch.float32) -> list[float]:
    losses: list[float] = []
    for index in range(steps):
        loss = engine(batch(index, dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def whole(engine: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_contiguous": {"contiguous_gradients": False},
    "no_scatter": {"reduce_scatter": False},
    "overlap": {"overlap_comm": True},
    "small_buckets": {"reduce_bucket_size": 10, "allgather_bucket_size": 10},
    "round_robin": {"round_robin_gradients": True},
    "no_partitions": {"allgather_partitions": False},
    "cpu_optimizer": {"offload_optimizer": {"device": "cpu"}},
    "persist": {"stage3_param_persistence_threshold": 100},
    "few_live": {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1},
    "no_prefetch": {"stage3_prefetch_bucket_size": 0},
    "sub_groups": {"sub_group_size": 10},
    "sanity": {"enable_sanity_checks": True},
    "fetch_all_reduce": {"stage3_use_all_reduce_for_fetch_params": True},
    "granularity": {"stage3_module_granularity_threshold": 30},
}


@case(ranks=2, stage=[0, 1, 2, 3], option=list(OPTIONS))
def trained(stage: int, option: str) -> Any:
    more: dict[str, Any] = {"zero": OPTIONS[option]}
    if option == "cpu_optimizer":
        more["optimizer"] = {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}}
        more["zero_force_ds_cpu_optimizer"] = False
    engine = start(stage, **more)
    return [train(engine), {name: value.sum() for name, value in whole(engine).items()}]


@case(ranks=2, stage=[0, 1, 2, 3], kind=["unused", "frozen", "no_bias", "tied", "dict_output", "kwargs", "shared_twice"])
def models(stage: int, kind: str) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            if kind == "tied":
                self.two.weight = self.one.weight

        def forward(self, value: torch.Tensor, scale: float = 1.0, flag: Any = None) -> Any:
            out = self.two(self.one(value)) * scale
            if kind == "shared_twice":
                out = self.one(out)
            if kind != "unused":
                out = self.spare(out)
            return {"out": out} if kind == "dict_output" else out

    model = network(frozen=True) if kind == "frozen" else network(bias=False) if kind == "no_bias" else Net()
    engine = start(stage, model)
    losses: list[float] = []
    for index in range(3):
        out = engine(batch(index), scale=2.0, flag="x") if kind == "kwargs" else engine(batch(index))
        loss = (out["out"] if isinstance(out, dict) else out).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return [losses, {name: value.sum() for name, value in whole(engine).items()}]


@case(ranks=2, stage=[0, 1, 2, 3], steps=[2, 3], plain=[False, True])
def accumulation(stage: int, steps: int, plain: bool) -> Any:
    engine = start(stage, gradient_accumulation_steps=steps)
    found: list[Any] = []
    for index in range(2 * steps):
        engine.set_gradient_accumulation_boundary(index % steps == steps - 1) if plain else None
        loss = engine(batch(index)).square().mean()
        back = engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        found.append([float(back), boundary, engine.global_steps, engine.micro_steps])
    return [found, {name: value.sum() for name, value in whole(engine).items()}]


@case(ranks=2, stage=[0, 1, 2, 3])
def no_sync(stage: int) -> Any:
    engine = start(stage)

    def quiet() -> None:
        with engine.no_sync():
            engine.backward(engine(batch()).square().mean())

    failed = raised(quiet)
    if failed["raised"]:
        return failed
    engine.backward(engine(batch(1)).square().mean())
    engine.step()
    return {name: value.sum() for name, value in whole(engine).items()}


@case(ranks=2, stage=[0, 1, 2, 3])
def step_in_no_sync(stage: int) -> Any:
    engine = start(stage)

    def wrong() -> None:
        with engine.no_sync():
            engine.step()

    def nested() -> None:
        with engine.no_sync(), engine.no_sync():
            pass

    return [raised(wrong), raised(nested)]


@case(ranks=2, stage=[0, 1, 2, 3], way=["engine", "loss", "scale"])
def backward_ways(stage: int, way: str) -> Any:
    engine = start(stage)

    def run() -> None:
        loss = engine(batch()).square().mean()
        if way == "engine":
            engine.backward(loss)
        elif way == "scale":
            engine.scale(loss).backward()
        else:
            loss.backward()
        engine.step()

    failed = raised(run)
    return failed if failed["raised"] else {name: value.sum() for name, value in whole(engine).items()}


@case(ranks=2, stage=[0, 1, 2, 3])
def evaluation(stage: int) -> Any:
    engine = start(stage)
    train(engine, 1)
    engine.eval()
    with torch.no_grad():
        first = engine(batch(3))
    engine.train()
    return [first, train(engine, 1), engine.module.training]


@case(ranks=2, stage=[0, 1, 2, 3])
def norms(stage: int) -> Any:
    engine = start(stage, gradient_clipping=0.5)
    before = engine.get_global_grad_norm()
    train(engine, 2)
    after = engine.get_global_grad_norm()
    return [before is None, None if stage == 0 else float(after)]


@case(ranks=2, stage=[0, 1, 2, 3])
def accessors(stage: int) -> Any:
    engine = start(stage)
    train(engine, 2)
    return [
        engine.zero_optimization(),
        engine.zero_optimization_stage(),
        engine.zero_optimization_partition_gradients(),
        engine.zero_optimization_partition_weights(),
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        engine.get_lr(),
        engine.get_mom(),
        engine.get_type(),
        engine.fp16_enabled(),
        engine.bfloat16_enabled(),
        engine.gradient_clipping(),
        engine.optimizer_name(),
        engine.scheduler_name(),
        engine.steps_per_print(),
        engine.wall_clock_breakdown(),
        engine.postscale_gradients(),
        engine.gradient_predivide_factor(),
        engine.dump_state(),
        engine.memory_breakdown(),
        engine.global_steps,
        engine.global_samples,
        engine.micro_steps,
        engine.skipped_steps,
        engine.world_size,
        engine.dp_world_size,
        engine.mp_world_size,
        engine.global_rank,
        str(engine.device),
        engine.zero_gather_16bit_weights_on_model_save(),
        engine.zero_reduce_bucket_size(),
        engine.zero_overlap_comm(),
        engine.zero_allgather_bucket_size(),
        engine.zero_contiguous_gradients(),
        engine.zero_reduce_scatter(),
        engine.zero_load_from_fp32_weights(),
        engine.zero_elastic_checkpoint(),
        engine.zero_max_live_parameters(),
        engine.zero_prefetch_bucket_size(),
        engine.zero_param_persistence_threshold(),
        engine.zero_sub_group_size(),
        engine.has_moe_layers,
        engine.module is not engine,
        engine.pld_enabled() if hasattr(engine, "pld_enabled") else None,
        engine.train() is None,
        engine.eval() is None,
    ]


@case(
    stage=[1, 2, 3],
    keys=[{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}, {"gradient_allreduce_op": "sum"}],
    ranks=2,
)
def averaging(stage: int, keys: dict[str, Any]) -> Any:
    found: list[Any] = []
    failed = raised(lambda: found.append(start(stage, zero={"reduce_scatter": False}, **keys)))
    return failed if failed["raised"] else train(found[0])


@case(ranks=2, stage=[0, 1, 2, 3], new=[8, 4])
def batch_size_changes(stage: int, new: int) -> Any:
    engine = start(stage)
    engine.set_train_batch_size(new)
    return [
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        raised(lambda: engine.set_train_batch_size(7)),
    ]


@case(ranks=2, workers=[0], drop=[True, False])
def loader(workers: int, drop: bool) -> Any:
    deepspeed.init_distributed("gloo")
    data = torch.utils.data.TensorDataset(torch.arange(10.0).view(10, 1).repeat(1, 4))
    _, _, held, _ = deepspeed.initialize(
        model=network(), config=config(1, dataloader_drop_last=drop), training_data=data
    )
    rows = [batch[0][:, 0].tolist() for batch in held]
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, rows)
    return [
        len(held),
        [len(row) for row in rows],
        len({value for each in gathered for row in each for value in row}),
    ]


@case(stage=[0, 1, 2, 3])
def engine_is_a_module(stage: int) -> Any:
    engine = start(stage)
    return [
        isinstance(engine, nn.Module),
        isinstance(engine, deepspeed.DeepSpeedEngine),
        sorted(name for name, _ in engine.named_parameters()),
        sorted(engine.module_state_dict()) if stage < 3 else None,
        raised(lambda: engine.no_such_attribute),
        len(list(engine.parameters())),
    ]


@case(count=[1000], gpus=[1, 4], nodes=[1, 2], flag=[True, False])
def estimators(count: int, gpus: int, nodes: int, flag: bool) -> Any:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    return [
        list(estimate_zero2_model_states_mem_needs(count, gpus, nodes, cpu_offload=flag)),
        list(
            estimate_zero3_model_states_mem_needs(
                count, 100, gpus, nodes, cpu_offload=flag, cpu_offload_params=flag, zero_init=not flag
            )
        ),
        list(
            estimate_zero3_model_states_mem_needs(
                count, 100, gpus, nodes, cpu_offload=True, cpu_offload_params=False, zero_init=flag
            )
        ),
    ]


@case(splits=[(1, 1), (2, 1), (1, 2), (2, 3), (4, 4)], bias=[True, False], split=[False, True])
def tiles(splits: tuple[int, int], bias: bool, split: bool) -> Any:
    from deepspeed.runtime.zero.tiling import TiledLinear

    torch.manual_seed(0)
    base = nn.Linear(8, 9, bias=bias)
    held = TiledLinear(
        8, 9, bias=bias, in_splits=splits[0], out_splits=splits[1], init_linear=base, combine_out_splits=not split
    )
    value = torch.randn(2, 8, requires_grad=True)
    out = held(value)
    joined = torch.cat(list(out), -1) if split else out
    joined.square().sum().backward()
    return [joined, value.grad, torch.allclose(joined, base(value), atol=1e-5), len(out) if split else None]


@case(wrong=[(0, 1), (9, 1), (1, 10), (1, 0)])
def tiles_refuse(wrong: tuple[int, int]) -> Any:
    from deepspeed.runtime.zero.tiling import TiledLinear

    return raised(lambda: TiledLinear(8, 9, in_splits=wrong[0], out_splits=wrong[1]))


@case(ranks=2, way=["class", "name", "both", "none", "unset", "flag"])
def leaf_modules(way: str) -> Any:
    from deepspeed.utils import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        unset_z3_leaf_modules,
        z3_leaf_module,
    )

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.two(value) + self.one(value)

    torch.manual_seed(0)
    model = nn.Sequential(Pair(), Pair(), nn.Linear(4, 1))
    deepspeed.init_distributed("gloo")
    if way == "none":
        return [
            raised(lambda: set_z3_leaf_modules(model, [nn.Conv2d])),
            raised(lambda: set_z3_leaf_modules(model, ["Nothing"], raise_if_not_found=False)),
        ]
    if way == "flag":
        set_z3_leaf_module(model[0], True)
        return [z3_leaf_module(model[0]), z3_leaf_module(model[1]), len(get_z3_leaf_modules(model))]
    kinds: list[Any] = {
        "class": [Pair],
        "name": [f"{Pair.__module__}.{Pair.__qualname__}"],
        "both": [Pair, nn.Linear],
        "unset": [Pair],
    }[way]
    found = set_z3_leaf_modules(model, kinds)
    names = [len(found), z3_leaf_module(model[0]), len(get_z3_leaf_modules(model))]
    if way == "unset":
        unset_z3_leaf_modules(model, [Pair])
        names.append(len(get_z3_leaf_modules(model)))
    return [names, train(start(3, model))]


@case(ranks=2, stage=[0, 1, 2, 3], include=[None, ["optim_states"], ["hp_params", "lp_params"]])
def offload_states(stage: int, include: Any) -> Any:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    engine = start(stage)
    train(engine, 1)

    def move() -> None:
        engine.offload_states(include=None if include is None else [OffloadStateTypeEnum(name) for name in include])
        engine.reload_states()

    return [raised(move), train(engine, 1)]


@case(ranks=2, stage=[1, 2, 3])
def state_dict_of_optimizer(stage: int) -> Any:
    engine = start(stage)
    train(engine, 1)
    state = engine.optimizer.state_dict()
    return [isinstance(state, dict), engine.optimizer.param_groups[0]["lr"], len(engine.optimizer.param_groups)]


@case(ranks=2, stage=[0, 1, 2, 3])
def gradient_hooks_and_zero_grad(stage: int) -> Any:
    engine = start(stage)
    engine.backward(engine(batch()).square().mean())
    engine.zero_grad()
    engine.optimizer.zero_grad()
    return train(engine, 2)


@case(ranks=2, stage=[0, 1, 2, 3])
def destroyed_and_built_again(stage: int) -> Any:
    model = network()
    engine = start(stage, model)
    train(engine, 1)
    engine.destroy()
    return True


@case(ranks=2, kind=["params", "everything"])
def offload_to_host(kind: str) -> Any:
    zero: dict[str, Any] = {"offload_param": {"device": "cpu"}}
    if kind == "everything":
        zero["offload_optimizer"] = {"device": "cpu"}
    engine = start(3, zero=zero, zero_force_ds_cpu_optimizer=False)
    return train(engine)


@case(ranks=2, stage=[2, 3])
def offload_partly(stage: int) -> Any:
    found: list[Any] = []
    failed = raised(
        lambda: found.append(
            start(
                stage,
                zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
                optimizer={"type": "Adam", "params": {"lr": 0.05}},
            )
        )
    )
    return failed if failed["raised"] else train(found[0])


@case(ranks=2, stage=[0, 1, 2, 3], dtype=["fp16", "bf16"])
def half_models(stage: int, dtype: str) -> Any:
    engine = start(stage, **{dtype: {"enabled": True}})
    kind = torch.half if dtype == "fp16" else torch.bfloat16
    losses = train(engine, 2, kind)
    return [round(losses[0], 1), {name: str(value.dtype) for name, value in whole(engine).items()}]


@case(ranks=2, stage=[0, 3])
def embeddings(stage: int) -> Any:
    torch.manual_seed(0)

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(8, 4), nn.Linear(4, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(tokens)).square().mean()

    engine = start(stage, Bag())
    losses: list[float] = []
    for index in range(3):
        loss = engine(torch.tensor([index, 3 + torch.distributed.get_rank()]))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses
