"""Half precision: scalers on their own, engines in fp16 and bf16, overflow, state."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaler
from torch import nn

from .case import case, raised

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Sum(nn.Module):
    """One weight whose gradient is the input: what overflows is chosen."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return (self.weight * value).sum()


def built(mode: str, stage: int, section: dict[str, Any] | None = None, kind: str = "Adam", **more: Any) -> Any:
    torch.manual_seed(0)
    params = {"lr": 0.01, "torch_adam": True} if kind == "Adam" else {"lr": 0.01}
    return deepspeed.initialize(
        model=more.pop("model", None) or Sum(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            mode: {"enabled": True, **(section or {})},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": kind, "params": params},
            **more,
        },
    )[0]


def step(engine: Any, value: float, dtype: torch.dtype) -> None:
    engine.backward(engine(torch.full((4,), value, dtype=dtype)))
    engine.step()


SEQUENCES = ["000000", "1", "11", "0110", "1010", "00001000", "111100001"]
SCALERS: list[dict[str, Any]] = [
    {"initial_scale_power": 4, "loss_scale_window": 2},
    {"initial_scale_power": 6, "loss_scale_window": 3, "hysteresis": 1},
    {"initial_scale_power": 5, "hysteresis": 3, "consecutive_hysteresis": True, "loss_scale_window": 2},
]


@case(stage=[0, 1, 2, 3], section=SCALERS, overflows=SEQUENCES)
def scale_follows(stage: int, section: dict[str, Any], overflows: str) -> Any:
    engine = built("fp16", stage, {**section, "min_loss_scale": 0.25})
    found: list[Any] = []
    for one in overflows:
        step(engine, float("inf") if one == "1" else 0.5, torch.half)
        found.append(
            [
                float(engine.optimizer.cur_scale),
                engine.skipped_steps,
                engine.global_steps,
                bool(engine.optimizer.overflow),
                engine.was_step_applied(),
            ]
        )
    return found


@case(stage=[0, 1, 2, 3], value=["nan", "-inf", "65504"])
def other_overflows(stage: int, value: str) -> Any:
    engine = built("fp16", stage, {"initial_scale_power": 2, "hysteresis": 1})
    step(engine, float(value), torch.half)
    return [float(engine.optimizer.cur_scale), engine.skipped_steps, bool(engine.optimizer.overflow)]


@case(stage=[0, 1, 2, 3], scale=[1, 128, 0.5])
def static_scale(stage: int, scale: float) -> Any:
    engine = built("fp16", stage, {"loss_scale": scale})
    found: list[Any] = [engine.dynamic_loss_scale(), float(engine.loss_scale())]
    for value in (0.5, float("inf"), 0.5):
        step(engine, value, torch.half)
        found.append([float(engine.optimizer.loss_scale), engine.skipped_steps, engine.global_steps])
    return found


@case(stage=[1, 2, 3])
def floor_of_the_scale(stage: int) -> Any:
    engine = built("fp16", stage, {"initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1})
    step(engine, float("inf"), torch.half)
    first = float(engine.optimizer.cur_scale)

    def again() -> None:
        step(engine, float("inf"), torch.half)

    return [first, raised(again)["raised"][-3:-1] != []]


@case(mode=["fp16", "bf16"], stage=[0, 1, 2, 3], kind=["Adam", "SGD", "AdamW"])
def trained(mode: str, stage: int, kind: str) -> Any:
    engine = built(
        mode,
        stage,
        {"initial_scale_power": 4} if mode == "fp16" else {},
        kind="Adam" if kind == "AdamW" else kind,
        model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
    )
    dtype = HALF[mode]
    found: list[Any] = []
    for index in range(3):
        loss = engine(torch.linspace(-1, 1, 4, dtype=dtype)[None] * (index + 1)).float().square().sum()
        engine.backward(loss)
        engine.step()
        found.append(round(float(loss), 2))
    return [
        found,
        str(next(engine.module.parameters()).dtype),
        type(engine.optimizer).__name__,
        engine.fp16_enabled(),
        engine.bfloat16_enabled(),
    ]


@case(stage=[0, 1, 2, 3], check=[True, False])
def bf16_overflow(stage: int, check: bool) -> Any:
    engine = built("bf16", stage, {"check_grad_overflow": check})
    step(engine, float("inf"), torch.bfloat16)
    step(engine, 0.5, torch.bfloat16)
    return [engine.skipped_steps, engine.global_steps]


@case(mode=["fp16", "bf16"], stage=[0, 1, 2, 3], steps=[1, 3])
def accumulated(mode: str, stage: int, steps: int) -> Any:
    engine = built(mode, stage, {"initial_scale_power": 2} if mode == "fp16" else {}, gradient_accumulation_steps=steps)
    found: list[Any] = []
    for index in range(6):
        loss = engine(torch.full((4,), 0.25 * (index + 1), dtype=HALF[mode]))
        back = engine.backward(loss)
        engine.step()
        found.append(
            [
                round(float(loss), 2),
                round(float(back), 2),
                engine.global_steps,
                engine.micro_steps,
                engine.is_gradient_accumulation_boundary(),
            ]
        )
    return found


@case(mode=["fp16", "bf16"], dtype=["fp32", "fp16", "bf16"], stage=[0, 1, 2, 3])
def grad_accum_dtype(mode: str, dtype: str, stage: int) -> Any:
    found: list[Any] = []
    failed = raised(
        lambda: found.append(
            built(mode, stage, {"initial_scale_power": 2} if mode == "fp16" else {}, data_types={"grad_accum_dtype": dtype})
        )
    )
    if failed["raised"]:
        return failed
    step(found[0], 0.5, HALF[mode])
    return [type(found[0].optimizer).__name__, found[0].global_steps]


@case(mode=["fp16", "bf16"], comm=["fp32", "fp16", "bf16"], stage=[0, 1, 2, 3])
def communication_dtype(mode: str, comm: str, stage: int) -> Any:
    engine = built(mode, stage, {"initial_scale_power": 2} if mode == "fp16" else {}, communication_data_type=comm)
    step(engine, 0.5, HALF[mode])
    return [str(engine.communication_data_type), engine.global_steps, engine.skipped_steps]


@case(mode=["fp16", "bf16"], stage=[0, 1, 2, 3], bn=[True, False])
def dtypes_of_buffers(mode: str, stage: int, bn: bool) -> Any:
    engine = built(mode, stage, model=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if bn else nn.Identity()))
    return [
        {name: str(value.dtype) for name, value in engine.module.named_buffers()},
        [str(value.dtype) for value in engine.module.parameters()],
    ]


def dynamic(**more: Any) -> DynamicLossScaler:
    return DynamicLossScaler(
        **{"init_scale": 2**10, "scale_window": 2, "min_scale": 1, "delayed_shift": 1, "consecutive_hysteresis": False}
        | {"raise_error_at_min_scale": False}
        | more
    )


@case(
    arguments=[{}, {"init_scale": 8, "delayed_shift": 2}, {"scale_window": 1, "min_scale": 512, "delayed_shift": 3}],
    overflows=SEQUENCES,
)
def dynamic_scaler(arguments: dict[str, Any], overflows: str) -> Any:
    held = dynamic(**arguments)
    found: list[Any] = []
    for one in overflows:
        held.update_scale(one == "1")
        found.append([float(held.cur_scale), held.cur_iter, held.last_overflow_iter, held.cur_hysteresis])
    return found


@case(value=["nan", "inf", "-inf", "1"])
def scaler_sees(value: str) -> Any:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, float(value)])
    return [bool(dynamic().has_overflow_serial([weight])), LossScaler(scale=3).has_overflow([weight])]


@case(dtype=[torch.half, torch.float32, torch.bfloat16], static=[0, 4.0])
def created_scaler(dtype: torch.dtype, static: float) -> Any:
    held = CreateLossScaler(dtype=dtype, static_loss_scale=static, dynamic_scaling=static == 0, dynamic_loss_args=None)
    return [type(held).__name__, float(held.loss_scale), held.dynamic]


@case(stage=[0, 1, 2, 3])
def engine_scale(stage: int) -> Any:
    engine = built("fp16", stage, {"initial_scale_power": 5})
    loss = engine(torch.full((4,), 0.5, dtype=torch.half))
    back = engine.backward(loss)
    return [
        float(loss),
        float(back),
        float(engine.optimizer.loss_scale),
        engine.dynamic_loss_scale(),
        engine.initial_dynamic_scale(),
        engine.dynamic_loss_scale_args(),
    ]


@case(stage=[1, 2, 3], mode=["fp16", "bf16"], form=["dict", "tuple", "loss_in_dict"])
def outputs(stage: int, mode: str, form: str) -> Any:
    class Out(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, value: torch.Tensor) -> Any:
            loss = (self.weight * value).sum()
            return {"dict": {"loss": loss, "more": [value]}, "tuple": (loss, value), "loss_in_dict": {"a": {"loss": loss}}}[
                form
            ]

    engine = built(mode, stage, model=Out())
    out = engine(torch.ones(4, dtype=HALF[mode]))
    loss = {"dict": lambda: out["loss"], "tuple": lambda: out[0], "loss_in_dict": lambda: out["a"]["loss"]}[form]()
    engine.backward(loss)
    engine.step()
    return [type(out).__name__, float(loss), engine.global_steps]


@case(
    mode=["fp16", "bf16"],
    stage=[1, 2],
    key=["fp16_master_weights_and_grads", "bf16_master_weights_and_grads"],
    offload=[False, True],
)
def master_in_half(mode: str, stage: int, key: str, offload: bool) -> Any:
    if not key.startswith(mode):
        return None
    found: list[Any] = []
    zero: dict[str, Any] = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    failed = raised(
        lambda: found.append(
            deepspeed.initialize(
                model=Sum(),
                config={
                    "train_batch_size": 1,
                    mode: {"enabled": True, key: True},
                    "zero_optimization": zero,
                    "optimizer": {"type": "Adam", "params": {"lr": 0.01, **({} if offload else {"torch_adam": True})}},
                },
            )[0]
        )
    )
    if failed["raised"]:
        return failed
    step(found[0], 0.5, HALF[mode])
    return found[0].global_steps


@case(stage=[0, 1, 2, 3], mode=["fp16", "bf16"])
def model_already_half(stage: int, mode: str) -> Any:
    engine = built(mode, stage, model=Sum().to(HALF[mode]))
    step(engine, 0.5, HALF[mode])
    return [engine.global_steps, str(engine.module.weight.dtype)]


@case(stage=[0, 1, 2, 3], dtype=[torch.float16, torch.bfloat16])
def half_model_without_the_section(stage: int, dtype: torch.dtype) -> Any:
    engine = deepspeed.initialize(
        model=Sum().to(dtype),
        config={
            "train_batch_size": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        },
    )[0]
    step(engine, 0.5, dtype)
    return [engine.global_steps, str(engine.module.weight.dtype)]


@case(dtype=["float16", "bfloat16"], stage=[0, 1, 2, 3])
def torch_autocast(dtype: Any, stage: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    engine = deepspeed.initialize(
        model=model,
        config={
            "train_batch_size": 1,
            "zero_optimization": {"stage": stage},
            "torch_autocast": {"enabled": True, "dtype": str(dtype).replace("torch.", "")},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        },
    )[0]
    if dtype == "float16":
        with torch.no_grad():
            return str(engine(torch.ones(1, 4)).dtype)
    loss = engine(torch.ones(1, 4))
    engine.backward(loss.float().sum())
    engine.step()
    return [str(loss.dtype), str(next(engine.module.parameters()).dtype), engine.global_steps]
