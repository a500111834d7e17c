"""`initialize`: the arguments that it takes, the objects that it builds, and its errors for wrong arguments."""

from __future__ import annotations

import argparse
import base64
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import shoal
from shoal.errors import ConfigError, OptimizerError, UsageError
from shoal.schedule import WarmupLR
from shoal.testing import run_ranks

from ..zero.models import batch, loss_of
from .trained import build, configured, model, same, train, weights


def without_optimizer(**extra: Any) -> dict[str, Any]:
    config = configured(**extra)
    del config["optimizer"]
    return config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shoal.json"
    path.write_text(json.dumps(configured(1)))
    return path


def test_the_configuration_is_a_file_dict_base64_or_argument(file: Path) -> None:
    text = base64.urlsafe_b64encode(file.read_bytes()).decode()
    parser = shoal.add_config_arguments(argparse.ArgumentParser())
    for source in (file, str(file), text, configured(1)):
        assert shoal.initialize(model=model(), config=source)[0].zero_optimization_stage() == 1
        assert shoal.initialize(model=model(), config_params=source)[0].zero_optimization_stage() == 1
    for flag in ("--shoal-config", "--deepspeed_config", "--deepspeed-config", "--deepscale_config"):
        args = parser.parse_args(["--deepspeed", flag, str(file)])
        assert shoal.initialize(args=args, model=model())[0].config == configured(1)
    assert shoal.initialize(args=argparse.Namespace(deepspeed_config=str(file)), model=model())[0].config == configured(1)


def test_two_configurations_or_none_are_refused(file: Path, tmp_path: Path) -> None:
    args = argparse.Namespace(shoal_config=str(file))
    with pytest.raises(ConfigError, match=r"initialize: got args\.shoal_config and config; give one: config=PATH_OR_DICT"):
        shoal.initialize(args=args, model=model(), config=configured())
    with pytest.raises(ConfigError, match="initialize: got config and config_params; give one"):
        shoal.initialize(model=model(), config=configured(), config_params=configured())
    for empty in (None, argparse.Namespace(shoal_config=None)):
        with pytest.raises(ConfigError, match="initialize: got no configuration; give one"):
            shoal.initialize(args=empty, model=model())
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        shoal.initialize(model=model(), config=str(tmp_path / "nowhere.json"))


def test_an_impossible_batch_shows_the_arithmetic_and_origin_of_ranks() -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size: got 7, but train_micro_batch_size_per_gpu 2 x "
                                          r"gradient_accumulation_steps 3 x 1 data rank = 6 \(data ranks: the world size of "
                                          r"torch\.distributed, from no launcher: this process is alone\)"):
        build(train_batch_size=7, gradient_accumulation_steps=3)


def test_a_missing_model_or_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="initialize: model is missing; pass the torch module to train"):
        shoal.initialize(config=configured())
    engine, *rest = shoal.initialize(model=model(), config=without_optimizer(scheduler={"type": "WarmupLR"}))
    assert rest == [None, None, None]
    assert engine.get_lr() == engine.get_mom() == engine.get_type() == [] and engine.get_global_grad_norm() is None
    assert engine.basic_optimizer is None and engine.optimizer_name() is None and engine.loss_scale() == 1
    engine.zero_grad()
    value = engine(batch(0, 0, 0)[0]).sum()
    for call, act in (("backward", lambda: engine.backward(value)), ("backward", value.backward), ("step", engine.step)):
        with pytest.raises(UsageError, match=f"{call}: the engine has no optimizer; give initialize one, or name one"):
            act()


def test_trainable_parameters_in_no_group_of_the_optimizer_are_named(caplog: pytest.LogCaptureFixture) -> None:
    whole = model()
    first, *others = whole.parameters()
    shoal.initialize(model=whole, optimizer=SGD([first], lr=0.1), config=without_optimizer())
    [said] = [record.getMessage() for record in caplog.records if "in no group of the optimizer" in record.getMessage()]
    names = [name for name, _ in whole.named_parameters()][1:]
    assert said.startswith(f"initialize: {len(others)} parameters of the {type(whole).__name__} require gradients")
    assert ", ".join(names[:5]) in said and "give them to this one in a group of their own" in said
    caplog.clear()
    frozen = model()
    for p in [*frozen.parameters()][1:]:
        p.requires_grad_(False)
    shoal.initialize(model=frozen, optimizer=SGD(frozen.parameters(), lr=0.1), config=without_optimizer())
    assert "in no group" not in caplog.text


class Normalised(SGD):
    """Divides the gradient by its norm over the tensor."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data -= group["lr"] * p.grad / p.grad.norm()


class Signed(SGD):
    """Steps by the sign of each element."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data -= group["lr"] * p.grad.sign()


@pytest.mark.parametrize(("make", "message"), [
    (torch.optim.LBFGS, "optimizer: LBFGS takes inner products over all parameters at once"),
    (torch.optim.Adafactor, "optimizer: Adafactor keeps row and column means"),
    (lambda p: Normalised(p, lr=1e-2), "optimizer: Normalised is not elementwise"),
])
def test_an_optimizer_that_is_not_elementwise_is_refused(make: Callable[..., Optimizer], message: str) -> None:
    net = model()
    with pytest.raises(OptimizerError, match=message):
        shoal.initialize(model=net, optimizer=make(net.parameters()), config=without_optimizer())
    net = model()
    with pytest.raises(OptimizerError, match=message):
        shoal.initialize(model=net, optimizer=make, config=without_optimizer())


def test_a_foreign_optimizer_that_is_elementwise_trains() -> None:
    net = model()
    engine = shoal.initialize(model=net, optimizer=Signed(net.parameters(), lr=1e-2), config=without_optimizer(stage=3))[0]
    before = weights(engine)
    train(engine, 1)
    moved = torch.cat([(before[name] - after).flatten() for name, after in weights(engine).items()])
    assert torch.allclose(moved[moved != 0].abs(), torch.tensor(1e-2), rtol=1e-3)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    net = model()
    optimizer = AdamW(net.parameters())
    loss_of(net(batch(0, 0, 0)[0]), batch(0, 0, 0)[1]).backward()
    optimizer.step()
    with pytest.raises(UsageError, match="initialize: the AdamW has stepped already and holds state for whole parameters"):
        shoal.initialize(model=net, optimizer=optimizer, config=without_optimizer())


def test_a_parameter_twice_or_of_another_model_is_refused() -> None:
    net = model()
    twice = [{"params": [net.embed.weight, net.head.bias]}, {"params": [net.head.bias]}]
    with pytest.raises(UsageError, match=r"optimizer group 1: parameter 'head\.bias' appears a second time \(first in group "
                                         r"0\); each parameter belongs to one group"):
        shoal.initialize(model=net, model_parameters=twice, config=configured())
    for stranger in (nn.Parameter(torch.zeros(4, 2)), torch.zeros(4, 2)):
        with pytest.raises(UsageError, match=r"optimizer group 0: got a tensor of shape \(4, 2\) that is no parameter of "
                                             r"the model; pass parameters of the model given to initialize"):
            shoal.initialize(model=net, model_parameters=[net.head.bias, stranger], config=configured())


def test_parameters_that_are_in_no_group_are_not_trained() -> None:
    net = model()
    engine = shoal.initialize(model=net, model_parameters=net.head.parameters(), config=configured(2))[0]
    before = weights(engine)
    train(engine, 1)
    moved = {name for name, after in weights(engine).items() if not torch.equal(before[name], after)}
    assert moved == {"head.weight", "head.bias"}


def test_without_model_parameters_all_are_trained() -> None:
    for given in (None, [], iter([])):
        net = model()
        engine = shoal.initialize(model=net, model_parameters=given, config=configured())[0]
        assert engine.sharded is not None and sum(u.layout.elements for u in engine.sharded.trainable) == sum(
            p.numel() for p in net.parameters())


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(net.head.parameters()), "lr": 0.5},
            {"params": [p for n, p in net.named_parameters() if "head" not in n]}]


@pytest.mark.parametrize("stage", [0, 3])
def test_instance_factory_and_name_give_the_same_training(stage: int) -> None:
    def make(groups: Any) -> Optimizer:
        return SGD(groups, lr=1e-2, momentum=0.9)

    def engines() -> Iterator[shoal.Engine]:
        net = model()
        yield shoal.initialize(model=net, optimizer=make(_groups(net)), config=without_optimizer(stage=stage))[0]
        net = model()
        yield shoal.initialize(model=net, optimizer=make, model_parameters=_groups(net),
                               config=without_optimizer(stage=stage))[0]
        net = model()
        named = configured(stage, optimizer={"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}})
        yield shoal.initialize(model=net, model_parameters=_groups(net), config=named)[0]

    found = []
    for engine in engines():
        assert engine.get_lr() == [0.5, 1e-2] and engine.get_mom() == [0.9, 0.9]
        found.append((train(engine, 3), weights(engine)))
    assert all(losses == found[0][0] and same(after, found[0][1]) for losses, after in found)


def test_a_given_optimizer_takes_precedence_over_the_configured_one() -> None:
    net = model()
    engine = shoal.initialize(model=net, optimizer=SGD(net.parameters(), lr=3.0), config=configured())[0]
    assert engine.get_type() == ["SGD"] and engine.get_lr() == [3.0]


def rates(engine: shoal.Engine, steps: int) -> list[float]:
    found = []
    for step in range(steps):
        train(engine, 1, step)
        found += engine.get_lr()
    return found


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_is_given_by_name_object_or_function() -> None:
    def on(optimizer: Any) -> StepLR:
        return StepLR(optimizer, step_size=1, gamma=0.5)

    net = model()
    optimizer = SGD(net.parameters(), lr=1.0)
    schedule = on(optimizer)
    engine, *_, returned = shoal.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule,
                                            config=without_optimizer())
    assert returned is schedule is engine.lr_scheduler
    assert rates(engine, 3) == [0.5, 0.25, 0.125]
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    engine = shoal.initialize(model=model(), lr_scheduler=on, config=configured(optimizer=sgd))[0]
    assert isinstance(engine.lr_scheduler, StepLR) and rates(engine, 2) == [0.5, 0.25]
    named = {"type": "CosineAnnealingLR", "params": {"T_max": 2}}
    engine = build(optimizer=sgd, scheduler=named)
    assert isinstance(engine.lr_scheduler, CosineAnnealingLR) and rates(engine, 2) == pytest.approx([0.5, 0])
    ours = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = build(optimizer=sgd, scheduler=ours, gradient_accumulation_steps=2)
    assert isinstance(engine.lr_scheduler, WarmupLR) and rates(engine, 3) == [0, 0.25, 0.5]
    engine.lr_scheduler = None  # trainers that step the schedule themselves do this
    train(engine, 1)
    assert engine.get_lr() == [0.5]


def test_a_given_schedule_takes_precedence_over_the_configured_one() -> None:
    engine = shoal.initialize(model=model(), lr_scheduler=lambda o: LambdaLR(o, lambda step: 1.0),
                              config=configured(scheduler={"type": "WarmupLR"}))[0]
    assert isinstance(engine.lr_scheduler, LambdaLR)


def test_a_single_tensor_and_named_parameters_are_accepted() -> None:
    for choose, elements in ((lambda net: net.head.bias, 17), (lambda net: list(net.head.named_parameters()), 17 * 13)):
        net = model()
        engine = shoal.initialize(model=net, model_parameters=[{"params": choose(net)}], config=configured())[0]
        assert engine.sharded is not None and sum(unit.layout.elements for unit in engine.sharded.trainable) == elements


def object_and_name() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal").addHandler(handler)
    network = nn.Linear(2, 2)
    shoal.initialize(model=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.5), config={
        "train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    return records


def schedule_alone() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal").addHandler(handler)
    shoal.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "scheduler": {"type": "WarmupLR"}})
    return records


@pytest.mark.parametrize(("section", "warns"), [({}, True), ({"bf16": {"enabled": True}}, False)])
def test_parameters_of_two_dtypes_give_a_warning(caplog: pytest.LogCaptureFixture, section: dict[str, Any],
                                                 warns: bool) -> None:
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    shoal.initialize(model=mixed, config={**configured(1), **section})
    told = "parameter '1.weight' is torch.bfloat16 and the first one is torch.float32: an engine has one dtype for all"
    assert (told in caplog.text) == warns


def test_a_schedule_without_an_optimizer_gives_a_warning() -> None:
    assert any(text.startswith("scheduler: has no effect without an optimizer") for text in run_ranks(1, schedule_alone)[0])


def test_an_optimizer_object_beside_a_configured_one_gives_a_warning() -> None:
    assert "optimizer: initialize was given an object, which is used; 'AdamW' of the configuration is not" in run_ranks(
        1, object_and_name)[0]
