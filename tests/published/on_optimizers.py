"""Optimizers: published classes on their own, and those that engines choose."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from torch import nn

from .case import case, raised

KINDS: dict[str, Any] = {
    "CPUAdam": DeepSpeedCPUAdam,
    "FusedAdam": FusedAdam,
    "CPUAdagrad": DeepSpeedCPUAdagrad,
    "CPULion": DeepSpeedCPULion,
    "FusedLion": FusedLion,
    "FusedLamb": FusedLamb,
}


def stepped(kind: Any, dtype: torch.dtype, steps: int = 4, **arguments: Any) -> Any:
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(33).to(dtype)), nn.Parameter(torch.randn(3, 5).to(dtype))]
    held = kind(weights, **arguments)
    for step in range(steps):
        for weight in weights:
            weight.grad = (torch.linspace(-1, 1, weight.numel()).view_as(weight) * (step + 1)).to(dtype)
        held.step()
    return [*weights, sorted(key for key in held.state[weights[0]])]


@case(
    kind=["CPUAdam"],
    dtype=[torch.float32, torch.bfloat16],
    given=[
        {},
        {"adamw_mode": False, "weight_decay": 0.1},
        {"adamw_mode": True, "weight_decay": 0.1},
        {"bias_correction": False},
        {"betas": (0.5, 0.7), "eps": 1e-3, "lr": 0.1},
    ],
)
def cpu_adam(kind: str, dtype: torch.dtype, given: dict[str, Any]) -> Any:
    return stepped(KINDS[kind], dtype, **given)


@case(given=[{}, {"adam_w_mode": False, "weight_decay": 0.1}, {"weight_decay": 0.1}, {"bias_correction": False}])
def fused_adam(given: dict[str, Any]) -> Any:
    return stepped(FusedAdam, torch.float32, **given)


@case(kind=["CPUAdagrad", "CPULion"], dtype=[torch.float32, torch.bfloat16], given=[{}, {"weight_decay": 0.1}, {"lr": 0.5}])
def cpu_others(kind: str, dtype: torch.dtype, given: dict[str, Any]) -> Any:
    return stepped(KINDS[kind], dtype, **given)


@case(kind=list(KINDS))
def amsgrad(kind: str) -> Any:
    weights = [nn.Parameter(torch.ones(3))]
    return raised(lambda: KINDS[kind](weights, amsgrad=True))


@case(kind=list(KINDS))
def defaults(kind: str) -> Any:
    held = KINDS[kind]([nn.Parameter(torch.ones(3))])
    return {key: list(value) if isinstance(value, tuple) else value for key, value in sorted(held.defaults.items())} | {
        "base": isinstance(held, torch.optim.Optimizer)
    }


@case(kind=["CPUAdam", "CPUAdagrad", "CPULion"])
def empty_and_groups(kind: str) -> Any:
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    held = KINDS[kind]([{"params": [one], "lr": 0.1}, {"params": [two], "lr": 0.2}])
    one.grad = torch.ones(3)
    held.step()
    return [one, two, [group["lr"] for group in held.param_groups]]


@case(kind=["CPUAdam", "CPUAdagrad", "CPULion"])
def state_dict_round_trip(kind: str) -> Any:
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(5))]
    held = KINDS[kind](weights)
    weights[0].grad = torch.ones(5)
    held.step()
    other = [nn.Parameter(weights[0].detach().clone())]
    again = KINDS[kind](other)
    again.load_state_dict(held.state_dict())
    for each, optimizer in ((weights, held), (other, again)):
        each[0].grad = torch.full((5,), 2.0)
        optimizer.step()
    return [torch.equal(weights[0], other[0]), sorted(held.state_dict())]


CHOSEN = [
    ("Adam", {"torch_adam": True}),
    ("Adam", {"torch_adam": True, "adam_w_mode": False, "weight_decay": 0.1}),
    ("AdamW", {"torch_adam": True, "weight_decay": 0.1}),
    ("Adam", {}),
    ("AdamW", {}),
    ("adamw", {}),
    ("SGD", {"momentum": 0.9}),
    ("Adagrad", {}),
    ("RMSprop", {}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("Lion", {}),
    ("LAMB", {}),
]


@case(chosen=CHOSEN, stage=[0, 1, 2, 3])
def configured(chosen: tuple[str, dict[str, Any]], stage: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine, held, _, _ = deepspeed.initialize(
        model=model,
        config={
            "train_batch_size": 2,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": chosen[0], "params": {"lr": 0.01, **chosen[1]}},
        },
    )
    losses = train(engine)
    return [type(engine.basic_optimizer).__name__, type(held).__name__, engine.optimizer_name(), losses]


def train(engine: Any, steps: int = 4, dtype: torch.dtype = torch.float32) -> list[float]:
    draw = torch.Generator().manual_seed(3)
    losses: list[float] = []
    for _ in range(steps):
        loss = engine(torch.randn(2, 4, generator=draw).to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


@case(stage=[0, 1, 2, 3], form=["object", "callable", "groups", "generator", "none"])
def client(stage: int, form: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    keywords: dict[str, Any] = {
        "object": lambda: {"optimizer": torch.optim.Adam(model.parameters(), lr=0.01)},
        "callable": lambda: {
            "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
            "model_parameters": model.parameters(),
        },
        "groups": lambda: {
            "optimizer": torch.optim.Adam(
                [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[1].parameters()}], lr=0.01
            )
        },
        "generator": lambda: {
            "optimizer": torch.optim.Adam(model.parameters(), lr=0.01),
            "model_parameters": model.parameters(),
        },
        "none": dict,
    }[form]()
    config: dict[str, Any] = {"train_batch_size": 2, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
    if form == "none":
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
        keywords["model_parameters"] = [
            {"params": list(model[0].parameters()), "lr": 0.05},
            {"params": list(model[1].parameters())},
        ]
    engine, held, _, _ = deepspeed.initialize(model=model, config=config, **keywords)
    losses = train(engine)
    return [
        type(engine.basic_optimizer).__name__,
        type(held).__name__,
        losses,
        [group["lr"] for group in held.param_groups],
        len(held.param_groups),
    ]


@case(stage=[0, 1, 2, 3], clip=[0.0, 0.01, 1.0])
def clipping(stage: int, clip: float) -> Any:
    torch.manual_seed(0)
    engine, _, _, _ = deepspeed.initialize(
        model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        config={
            "train_batch_size": 2,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": clip,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_allow_untested_optimizer": True,
        },
    )
    losses = train(engine)
    norm = engine.get_global_grad_norm()
    return [losses, None if stage == 0 else float(norm), engine.gradient_clipping()]


@case(stage=[1, 2, 3], kind=["SGD", "Adam", "RMSprop"], allow=[False, True])
def untested(stage: int, kind: str, allow: bool) -> Any:
    model = nn.Linear(4, 1)
    return raised(
        lambda: deepspeed.initialize(
            model=model,
            optimizer=getattr(torch.optim, kind)(model.parameters(), lr=0.1),
            config={"train_batch_size": 2, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": allow},
        )
    )


@case(stage=[1, 2, 3], force=[None, False], kind=["torch", "cpu"])
def offload_and_client_optimizer(stage: int, force: bool | None, kind: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config: dict[str, Any] = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
    }
    if force is not None:
        config["zero_force_ds_cpu_optimizer"] = force
    held = (DeepSpeedCPUAdam if kind == "cpu" else torch.optim.Adam)(model.parameters(), lr=0.01)
    found: list[Any] = []
    failed = raised(lambda: found.append(deepspeed.initialize(model=model, optimizer=held, config=config)[0]))
    return failed if failed["raised"] else train(found[0])
