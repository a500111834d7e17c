"""What ZeRO holds: the safe accessors, zero.Init, GatheredParameters, external parameters, whole state dicts."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import nn

from .case import case, raised
from .on_zero import batch, config, network, start, train, whole

# Accessors


@case(ranks=2, stage=[0, 1, 2, 3])
def safe_reads(stage: int) -> Any:
    engine = start(stage)
    train(engine, 1)
    engine.backward(engine(batch(5)).square().mean())
    found: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = [
            safe_get_full_fp32_param(parameter) if stage else None,
            safe_get_full_grad(parameter),
            safe_get_full_optimizer_state(parameter, "exp_avg") if stage else None,
            safe_get_full_optimizer_state(parameter, "exp_avg_sq") if stage else None,
        ]
    return found


@case(ranks=2, stage=[1, 2, 3], what=["param", "exp_avg", "exp_avg_sq", "grad"])
def safe_writes(stage: int, what: str) -> Any:
    engine = start(stage)
    train(engine, 1)
    engine.backward(engine(batch(5)).square().mean())
    found: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        shape = parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape
        value = torch.full(shape, 0.25)
        if what == "param":
            safe_set_full_fp32_param(parameter, value)
            found[name] = safe_get_full_fp32_param(parameter)
        elif what == "grad":
            safe_set_full_grad(parameter, value)
            found[name] = safe_get_full_grad(parameter)
        else:
            safe_set_full_optimizer_state(parameter, value, what)
            found[name] = safe_get_full_optimizer_state(parameter, what)
    engine.step()
    return [found, {name: value.sum() for name, value in whole(engine).items()}]


@case(ranks=2, what=["param", "exp_avg", "exp_avg_sq", "grad"])
def safe_local(what: str) -> Any:
    engine = start(3)
    train(engine, 1)
    engine.backward(engine(batch(5)).square().mean())
    parameter = engine.module[0].weight
    if what == "param":
        value = safe_get_local_fp32_param(parameter)
        safe_set_local_fp32_param(parameter, torch.full_like(value, 0.5))
        return [value, safe_get_local_fp32_param(parameter), safe_get_full_fp32_param(parameter)]
    if what == "grad":
        return safe_get_local_grad(parameter)
    value = safe_get_local_optimizer_state(parameter, what)
    safe_set_local_optimizer_state(parameter, torch.full_like(value, 0.5), what)
    return [value, safe_get_local_optimizer_state(parameter, what), safe_get_full_optimizer_state(parameter, what)]


@case(stage=[1, 2])
def safe_local_elsewhere(stage: int) -> Any:
    engine = start(stage)
    return raised(lambda: safe_get_local_fp32_param(engine.module[0].weight))


@case(ranks=2, stage=[1, 2, 3], when=["before", "after_step"])
def safe_grad_outside_backward(stage: int, when: str) -> Any:
    engine = start(stage)
    if when == "after_step":
        train(engine, 1)
    return safe_get_full_grad(engine.module[0].weight) is None


# zero.Init and gathering


@case(ranks=2, form=["config", "plain", "disabled", "module", "dtype"])
def init_contexts(form: str) -> Any:
    deepspeed.init_distributed("gloo")
    settings = config(3)
    if form == "module":
        model = network()
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    else:
        keywords: dict[str, Any] = {
            "config": {"config_dict_or_path": settings},
            "plain": {"dtype": torch.float32},
            "disabled": {"enabled": False, "config_dict_or_path": settings},
            "dtype": {"dtype": torch.bfloat16, "config_dict_or_path": settings},
        }[form]
        torch.manual_seed(torch.distributed.get_rank())
        with deepspeed.zero.Init(**keywords):
            model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    first = model[0].weight
    sharded = hasattr(first, "ds_id")
    found: list[Any] = [sharded, str(first.dtype)]
    if sharded:
        found += [
            list(first.ds_shape),
            first.ds_numel,
            first.ds_status == ZeroParamStatus.NOT_AVAILABLE,
            first.ds_tensor.numel(),
        ]
        with deepspeed.zero.GatheredParameters(first):
            found += [first.ds_status == ZeroParamStatus.AVAILABLE, list(first.shape)]
            value = first.detach().float().clone()
            torch.distributed.broadcast(value, 0)
            found.append(torch.equal(value, first.detach().float()))
    return found


@case(ranks=2, modifier=[None, 0, 1])
def modified_when_gathered(modifier: int | None) -> Any:
    engine = start(3)
    weight = engine.module[0].weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=modifier), torch.no_grad():
        if modifier is not None and torch.distributed.get_rank() == modifier:
            weight.fill_(modifier + 2.0)
    with deepspeed.zero.GatheredParameters([weight]):
        return weight.detach().clone()


@case(ranks=2, what=["one", "list", "generator", "nothing", "mixed", "module_parameters"])
def gathered_arguments(what: str) -> Any:
    engine = start(3)
    model = engine.module
    extra = nn.Parameter(torch.ones(2))
    given: Any = {
        "one": lambda: model[0].weight,
        "list": lambda: [model[0].weight, model[0].bias],
        "generator": model.parameters,
        "nothing": list,
        "mixed": lambda: [model[0].weight, extra],
        "module_parameters": lambda: list(model[2].parameters()),
    }[what]()
    with deepspeed.zero.GatheredParameters(given):
        return [list(model[0].weight.shape) if what != "nothing" else None]


@case(ranks=2)
def attributes_of_parameters() -> Any:
    engine = start(3)
    found: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = [
            list(parameter.ds_shape),
            parameter.ds_numel,
            parameter.ds_status.name,
            parameter.ds_persist,
            parameter.ds_tensor.numel(),
            parameter.ds_param_type.name if hasattr(parameter.ds_param_type, "name") else str(parameter.ds_param_type),
            isinstance(parameter.ds_active_sub_modules, set),
        ]
    return [
        found,
        sorted(parameter.ds_id for parameter in engine.module.parameters())
        == sorted({parameter.ds_id for parameter in engine.module.parameters()}),
    ]


@case(ranks=2, initialised=[False, True])
def init_then_train(initialised: bool) -> Any:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config(3), enabled=initialised):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 1))
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter) * (index + 1))
    return train(start(3, model))


@case(ranks=2)
def external_parameters() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            deepspeed.zero.register_external_parameter(self, self.first.weight)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.second(self.first(value)), self.first.weight)

    engine = start(3, Net())
    losses = train(engine)
    module = engine.module
    return [
        losses,
        len(list(module.ds_external_parameters())),
        len(list(module.all_parameters())) if hasattr(module, "all_parameters") else 5,
        raised(lambda: deepspeed.zero.register_external_parameter(module, torch.ones(2))),
        raised(lambda: deepspeed.zero.unregister_external_parameter(module, module.second.weight)) != {"raised": []},
    ]


@case(ranks=2)
def consolidated_state_dict() -> Any:
    engine = start(3, zero={"stage3_gather_16bit_weights_on_model_save": True})
    train(engine, 1)
    found = engine._zero3_consolidated_16bit_state_dict()
    return None if found is None else {name: value for name, value in found.items()}


@case(ranks=2, gather=[False, True])
def save_16bit_model(gather: bool) -> Any:
    from pathlib import Path

    engine = start(3, zero={"stage3_gather_16bit_weights_on_model_save": gather})
    answer = engine.save_16bit_model("out", "weights.bin")
    torch.distributed.barrier()
    return [bool(answer), Path("out/weights.bin").exists()]
