"""Learning-rate schedules: every value they give, their state, what they refuse, and how engines drive them."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import lr_schedules
from torch import nn

from .case import case, raised

GIVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "range": ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}),
    "stairs": ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    "range_lists": ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 2}),
    "cycle": ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}),
    "cycle_decay": (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 3,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
            "cycle_second_step_size": 5,
        },
    ),
    "cycle_stairs": (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 6,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 2,
        },
    ),
    "cycle_no_momentum": (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "cycle_momentum": False},
    ),
    "warmup": ("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": 1.0, "warmup_num_steps": 6}),
    "warmup_linear": (
        "WarmupLR",
        {"warmup_min_lr": 0, "warmup_max_lr": 1.0, "warmup_num_steps": 6, "warmup_type": "linear"},
    ),
    "warmup_own": ("WarmupLR", {"warmup_num_steps": 4}),
    "warmup_one": ("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 1}),
    "warmup_other": ("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 5, "warmup_type": "square"}),
    "decay": ("WarmupDecayLR", {"total_num_steps": 12, "warmup_max_lr": 1.0, "warmup_num_steps": 4}),
    "decay_linear": (
        "WarmupDecayLR",
        {"total_num_steps": 10, "warmup_min_lr": 0.1, "warmup_max_lr": 1.0, "warmup_num_steps": 5, "warmup_type": "linear"},
    ),
    "decay_short": ("WarmupDecayLR", {"total_num_steps": 3, "warmup_max_lr": 1.0, "warmup_num_steps": 6}),
    "cosine": ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 4}),
    "cosine_linear": (
        "WarmupCosineLR",
        {
            "total_num_steps": 12,
            "warmup_num_steps": 4,
            "warmup_min_ratio": 0.2,
            "warmup_type": "linear",
            "cos_min_ratio": 0.1,
        },
    ),
}


def optimizer(kind: str = "SGD") -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.3}, {"params": [model.bias], "lr": 0.6}]
    return torch.optim.Adam(groups) if kind == "Adam" else torch.optim.SGD(groups, lr=0.5, momentum=0.7)


@case(which=list(GIVEN), kind=["SGD", "Adam"])
def values(which: str, kind: str) -> Any:
    name, params = GIVEN[which]
    held = optimizer(kind)
    schedule = getattr(lr_schedules, name)(held, **params)
    found: list[Any] = [[group["lr"] for group in held.param_groups]]
    for _ in range(18):
        held.step()
        schedule.step()
        found.append(
            [
                schedule.get_lr(),
                schedule.get_last_lr(),
                [group["lr"] for group in held.param_groups],
                [list(group["betas"]) for group in held.param_groups] if kind == "Adam" else None,
            ]
        )
    return found


@case(which=list(GIVEN))
def state_is_restored(which: str) -> Any:
    name, params = GIVEN[which]
    one, two = optimizer("Adam"), optimizer("Adam")
    first, second = (getattr(lr_schedules, name)(held, **params) for held in (one, two))
    for _ in range(5):
        first.step()
    state = first.state_dict()
    second.load_state_dict(state)
    for schedule in (first, second):
        schedule.step()
    return [state, first.get_last_lr(), second.get_last_lr(), second.state_dict()]


@case(which=list(GIVEN))
def step_to_an_iteration(which: str) -> Any:
    name, params = GIVEN[which]
    held = optimizer("Adam")
    schedule = getattr(lr_schedules, name)(held, **params)
    found: list[Any] = []
    for at in (3, 0, 11):
        schedule.step(at)
        found.append([schedule.get_last_lr(), schedule.state_dict()])
    return found


@case(which=list(GIVEN))
def last_lr_before_a_step(which: str) -> Any:
    name, params = GIVEN[which]
    schedule = getattr(lr_schedules, name)(optimizer("Adam"), **params)
    try:
        return schedule.get_last_lr()
    except AssertionError as error:
        return "need to call step() first" in str(error)


@case(
    which=["WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest", "WarmupCosineLR"],
    what=["text", "lists", "zero", "negative"],
)
def wrong_arguments(which: str, what: str) -> Any:
    wrong: dict[str, dict[str, Any]] = {
        "WarmupLR": {
            "lists": {"warmup_max_lr": [1.0] * 3},
            "zero": {"warmup_num_steps": 0},
            "negative": {"warmup_num_steps": -2},
        },
        "WarmupDecayLR": {
            "lists": {"total_num_steps": 5, "warmup_max_lr": [1.0] * 3},
            "zero": {"total_num_steps": 5, "warmup_num_steps": 0},
            "negative": {"total_num_steps": 5, "warmup_num_steps": -1},
        },
        "OneCycle": {
            "lists": {"cycle_min_lr": [1.0] * 3, "cycle_max_lr": 2.0},
            "zero": {"cycle_min_lr": 1.0, "cycle_max_lr": 2.0, "cycle_first_step_size": 0},
            "negative": {"cycle_min_lr": 1.0, "cycle_max_lr": 2.0, "cycle_first_step_size": -1},
        },
        "LRRangeTest": {
            "lists": {"lr_range_test_min_lr": [1.0] * 3},
            "zero": {"lr_range_test_step_size": 0},
            "negative": {"lr_range_test_step_size": -1},
        },
        "WarmupCosineLR": {
            "lists": {},
            "zero": {"total_num_steps": 5, "warmup_num_steps": 0},
            "negative": {"total_num_steps": 5, "warmup_num_steps": -1},
        },
    }
    kind = getattr(lr_schedules, which)
    if what == "text":
        return raised(
            lambda: kind(
                "an optimizer",
                **GIVEN[
                    {
                        "WarmupLR": "warmup",
                        "WarmupDecayLR": "decay",
                        "OneCycle": "cycle",
                        "LRRangeTest": "range",
                        "WarmupCosineLR": "cosine",
                    }[which]
                ][1],
            )
        )
    return raised(lambda: kind(optimizer(), **wrong[which][what]))


@case(stage=[0, 1, 2, 3], which=["range", "cycle_decay", "warmup", "decay", "cosine"])
def in_an_engine(stage: int, which: str) -> Any:
    name, params = GIVEN[which]
    torch.manual_seed(0)
    engine, held, _, schedule = deepspeed.initialize(
        model=nn.Linear(2, 1),
        config={
            "train_batch_size": 1,
            "zero_optimization": {"stage": stage},
            "scheduler": {"type": name, "params": params},
            "optimizer": {"type": "Adam", "params": {"lr": 0.2, "torch_adam": True}},
        },
    )
    found: list[Any] = [type(schedule).__name__, engine.get_lr()]
    for _ in range(6):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        found.append([engine.get_lr(), engine.get_mom(), schedule.get_last_lr(), held.param_groups[0]["lr"]])
    return found


@case(name=["StepLR", "LambdaLR", "CosineAnnealingLR", "ExponentialLR"])
def of_torch_by_name(name: str) -> Any:
    params = {"StepLR": {"step_size": 2}, "CosineAnnealingLR": {"T_max": 4}, "ExponentialLR": {"gamma": 0.5}}.get(name)
    if params is None:
        return raised(
            lambda: deepspeed.initialize(
                model=nn.Linear(2, 1),
                config={
                    "train_batch_size": 1,
                    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
                    "scheduler": {"type": name, "params": {}},
                },
            )
        )
    engine, _, _, schedule = deepspeed.initialize(
        model=nn.Linear(2, 1),
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "scheduler": {"type": name, "params": params},
        },
    )
    found: list[Any] = [type(schedule).__name__]
    for _ in range(5):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        found.append(engine.get_lr())
    return found


@case(form=["object", "callable"], stage=[0, 2], config=[False, True])
def client_schedule(form: str, stage: int, config: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    held = torch.optim.Adam(model.parameters(), lr=0.5)

    def make(given: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(given, step_size=1, gamma=0.5)

    keys: dict[str, Any] = {"train_batch_size": 1, "zero_optimization": {"stage": stage}}
    if config:
        keys["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 3}}
    engine, _, _, schedule = deepspeed.initialize(
        model=model, optimizer=held, lr_scheduler=make(held) if form == "object" else make, config=keys
    )
    found: list[Any] = [type(schedule).__name__]
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        found.append(engine.get_lr())
    return found


@case()
def names() -> Any:
    return [sorted(lr_schedules.VALID_LR_SCHEDULES)]


@case(name=["WarmupLR", "OneCycle", "LRRangeTest"], overflow=[False, True])
def schedule_stays_when_a_step_is_skipped(name: str, overflow: bool) -> Any:
    params = {"WarmupLR": GIVEN["warmup"], "OneCycle": GIVEN["cycle"], "LRRangeTest": GIVEN["range"]}[name][1]
    engine, _, _, schedule = deepspeed.initialize(
        model=nn.Linear(2, 1),
        config={
            "train_batch_size": 1,
            "fp16": {"enabled": True, "initial_scale_power": 4},
            "scheduler": {"type": name, "params": params},
            "optimizer": {"type": "Adam", "params": {"lr": 0.2, "torch_adam": True}},
        },
    )
    found: list[Any] = []
    for step in range(4):
        value = float("inf") if overflow and step == 1 else 0.5
        engine.backward(engine(torch.full((1, 2), value, dtype=torch.half)).sum())
        engine.step()
        found.append([engine.get_lr(), schedule.state_dict(), engine.global_steps, engine.skipped_steps])
    return found


@case(accumulate=[1, 2, 3])
def one_step_of_the_schedule_a_step(accumulate: int) -> Any:
    engine, _, _, schedule = deepspeed.initialize(
        model=nn.Linear(2, 1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulate,
            "optimizer": {"type": "SGD", "params": {"lr": 0.2}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 5}},
        },
    )
    found: list[Any] = []
    for _ in range(6):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        found.append(
            [engine.get_lr(), schedule.state_dict()["last_batch_iteration"], engine.is_gradient_accumulation_boundary()]
        )
    return found


@case(
    args=[
        [],
        ["--lr_schedule", "WarmupLR", "--warmup_num_steps", "7", "--warmup_max_lr", "0.5"],
        ["--lr_schedule", "OneCycle", "--cycle_min_lr", "0.1"],
        ["--lr_schedule", "LRRangeTest", "--lr_range_test_staircase", "True"],
    ]
)
def tuning_arguments(args: list[str]) -> Any:
    found = lr_schedules.add_tuning_arguments(ArgumentParser()).parse_args(args)
    config, error = lr_schedules.get_config_from_args(found)
    return [vars(found), config, error is None, None if config is None else lr_schedules.get_lr_from_config(config)[0]]
