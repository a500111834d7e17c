"""Helpers: timers, logging, runtime.utils, OnDevice, monitors, progressive layers, sparse tensors, what is not built yet."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from .case import case, raised


@case(norm=[1, 2, 3, float("inf")], limit=[0.1, 100.0])
def clip_grad_norm(norm: float, limit: float) -> Any:
    from deepspeed.runtime.utils import clip_grad_norm_

    deepspeed.init_distributed("gloo")
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    for index, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, index + 1.0)
    found = clip_grad_norm_(weights, limit, norm_type=norm)
    return [float(found), [weight.grad for weight in weights]]


@case(norm=[2, float("inf")])
def grad_norms(norm: float) -> Any:
    from deepspeed.runtime.utils import get_grad_norm

    deepspeed.init_distributed("gloo")
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1.0, 2.0, 2.0])
    return float(get_grad_norm([weight], norm_type=norm))


@case(text=["debug", "info", "warning", "error", "critical", "loud"])
def log_levels(text: str) -> Any:
    from deepspeed.utils import logger, set_log_level_from_string

    failed = raised(lambda: set_log_level_from_string(text))
    return failed if failed["raised"] else [logger.level, logging.getLevelName(logger.level)]


@case()
def logger_facts() -> Any:
    from deepspeed.utils import logger
    from deepspeed.utils.logging import logger as same

    return [logger.name, isinstance(logger, logging.Logger), logger is same, logger.propagate]


@case(dtype=[torch.float16, torch.bfloat16, torch.float32], device=["meta", "cpu"])
def on_device(dtype: torch.dtype, device: str) -> Any:
    with deepspeed.OnDevice(dtype=dtype, device=device):
        layer = nn.Linear(2, 3)
    after = nn.Linear(2, 3)
    return [str(layer.weight.dtype), layer.weight.device.type, str(after.weight.dtype), after.weight.device.type]


@case()
def moved() -> Any:
    from deepspeed.runtime.utils import call_to_str, ensure_directory_exists, move_to_device

    ensure_directory_exists("a/b/file.txt")
    found = move_to_device({"x": [torch.ones(1), (torch.zeros(1), 3)], "y": "text"}, "cpu")
    return [found, call_to_str("run", 1, "a", key=2), Path("a/b").is_dir()]


@case()
def timers() -> Any:
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    held = SynchronizedWallClockTimer()
    one = held("step")
    one.start()
    one.stop()
    return [
        held("step") is one,
        one.elapsed(reset=True) >= 0,
        one.elapsed() == 0.0,
        held.has_timer("step"),
        held.has_timer("none"),
        one.mean() >= 0,
        sorted(held.get_timers()),
    ]


@case(theta=[0.5, 1.0, 0.1], gamma=[0.001, 0.1])
def csv_monitor(theta: float, gamma: float) -> Any:
    from deepspeed.monitor.monitor import MonitorMaster
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.init_distributed("gloo")
    held = MonitorMaster(
        DeepSpeedConfig(
            {"train_batch_size": 1, "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "job"}}
        ).monitor_config
    )
    held.write_events([("Train/loss", theta, 1), ("Train/loss", gamma, 2)])
    return [held.enabled, {str(path): path.read_text() for path in sorted(Path("logs").rglob("*.csv"))}]


@case()
def monitors_off() -> Any:
    from deepspeed.monitor.monitor import MonitorMaster
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.init_distributed("gloo")
    held = MonitorMaster(DeepSpeedConfig({"train_batch_size": 1}).monitor_config)
    held.write_events([("a", 1.0, 1)])
    return held.enabled


@case()
def sparse_tensor() -> Any:
    from deepspeed.runtime.sparse_tensor import SparseTensor

    dense = torch.zeros(5, 2)
    dense[1], dense[3] = 1.0, 2.0
    held = SparseTensor(dense)
    held.add(SparseTensor(dense * 2))
    return [held.to_dense(), held.sparse_size(), held.type(), held.indices.tolist()]


@case(start_again=[False, True])
def repeating_loader(start_again: bool) -> Any:
    from deepspeed.runtime.dataloader import RepeatingLoader

    held = iter(RepeatingLoader([1, 2, 3]))
    return [next(held) for _ in range(7)]


@case(ranks=2, size=[7, 8])
def partitioned_tensor(size: int) -> Any:
    from deepspeed.runtime.utils import PartitionedTensor

    deepspeed.init_distributed("gloo")
    group = torch.distributed.new_group([0, 1])
    whole = torch.arange(float(size * 2)).view(size, 2)
    held = PartitionedTensor(tensor=whole, group=group)
    again = PartitionedTensor.from_meta(held.to_meta(), held.data(), group)
    return [held.full(), again.full(), held.to_meta().tolist()]


@case(stage=[0, 1, 2, 3])
def csv_events_of_an_engine(stage: int) -> Any:
    engine = deepspeed.initialize(
        model=nn.Linear(2, 1),
        config={
            "train_batch_size": 1,
            "zero_optimization": {"stage": stage},
            "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "job"},
            "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4}},
        },
    )[0]
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    return {str(path): path.read_text() for path in sorted(Path("logs").rglob("*.csv"))}


@case(keys=["wall_clock_breakdown", "memory_breakdown", "dump_state", "steps_per_print"])
def reporting_keys(keys: str) -> Any:
    engine = deepspeed.initialize(
        model=nn.Linear(2, 1),
        config={
            "train_batch_size": 1,
            keys: 1 if keys == "steps_per_print" else True,
            "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        },
    )[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    return engine.global_steps


@case()
def memory_lines() -> Any:
    from deepspeed.runtime.utils import see_memory_usage

    deepspeed.init_distributed("gloo")
    see_memory_usage("now", force=True)
    see_memory_usage("now")
    return True


@case()
def flattened() -> Any:
    from deepspeed.runtime.zero.utils import is_zero_param
    from deepspeed.utils.tensor_fragment import fragment_address

    return [is_zero_param(torch.ones(1)), fragment_address(numel=3, start=4).start]


@case(ranks=2, what=["coalesced", "checks"])
def overflow_checks(what: str) -> Any:
    from deepspeed.runtime.utils import CheckOverflow

    deepspeed.init_distributed("gloo")
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, float("inf") if torch.distributed.get_rank() == 1 else 1.0])
    held = CheckOverflow()
    return (
        bool(held.check_using_norm([float("nan") if torch.distributed.get_rank() else 1.0]))
        if what == "coalesced"
        else bool(held.has_overflow([weight]))
    )


@case(ranks=2, kind=["data", "model"])
def mpu_of_the_client(kind: str) -> Any:
    class Mpu:
        """Every rank is a model rank of its own, or a data rank."""

        def __init__(self) -> None:
            self.all = torch.distributed.new_group([0, 1])
            self.alone = [torch.distributed.new_group([rank]) for rank in range(2)][torch.distributed.get_rank()]

        def get_data_parallel_group(self) -> Any:
            return self.all if kind == "data" else self.alone

        def get_data_parallel_rank(self) -> int:
            return torch.distributed.get_rank(self.get_data_parallel_group())

        def get_data_parallel_world_size(self) -> int:
            return torch.distributed.get_world_size(self.get_data_parallel_group())

        def get_model_parallel_group(self) -> Any:
            return self.alone if kind == "data" else self.all

        def get_model_parallel_rank(self) -> int:
            return torch.distributed.get_rank(self.get_model_parallel_group())

        def get_model_parallel_world_size(self) -> int:
            return torch.distributed.get_world_size(self.get_model_parallel_group())

        get_tensor_model_parallel_group = get_model_parallel_group
        get_tensor_model_parallel_rank = get_model_parallel_rank
        get_tensor_model_parallel_world_size = get_model_parallel_world_size

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    engine = deepspeed.initialize(
        model=nn.Linear(2, 1),
        mpu=Mpu(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        },
    )[0]
    loss = engine(torch.ones(2, 2) * (1 if kind == "model" else torch.distributed.get_rank())).square().mean()
    engine.backward(loss)
    engine.step()
    return [engine.train_batch_size(), engine.dp_world_size, engine.mp_world_size, engine.module.weight]
