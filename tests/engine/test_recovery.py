"""A call that fails changes nothing: not the model, the optimizer, the weights, nor the state that a checkpoint replaces."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

import shoal
from shoal.errors import CheckpointError, ConfigError, OptimizerError, UsageError
from shoal.optim import Lion
from shoal.schedule.registry import AnySchedule, required_arguments
from shoal.testing import run_ranks
from shoal.transport.collectives import Communicator, Label

WIDTH = 8
ELEMENTWISE = (Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, Lion, NAdam, RAdam, RMSprop, Rprop, SGD)


def model_of(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def config_of(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "timeout": 20, **more}


def train(engine: Any, steps: int = 1) -> None:
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(2, WIDTH)).pow(2).mean())
        engine.step()


def weights(engine: Any) -> list[Tensor]:
    with shoal.gathered(engine.module):
        return [parameter.detach().clone() for parameter in engine.module.parameters()]


class Mixing(Optimizer):
    """Not elementwise: it steps by the mean of the gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad.mean()


FAULTS: dict[str, tuple[type[Exception], Callable[[nn.Module], dict[str, Any]]]] = {
    "an optimizer that mixes elements": (OptimizerError, lambda m: {"optimizer": Mixing(m.parameters())}),
    "a function of such a one": (OptimizerError, lambda m: {"optimizer": lambda groups: Mixing(groups)}),
    "a function that returns something else": (UsageError, lambda m: {"optimizer": lambda groups: "adam"}),
    "a name in place of an optimizer": (UsageError, lambda m: {"optimizer": "adam"}),
    "an unknown name": (ConfigError, lambda m: {"config": {"optimizer": {"type": "Adm"}}}),
    "an unknown schedule": (ConfigError, lambda m: {"config": {
        "optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLRR"}}}),
    "a dataset that cannot be dealt": (UsageError, lambda m: {
        "config": {"optimizer": {"type": "Adam"}}, "training_data": 3}),
}


def failed_then_trained(stage: int) -> list[str]:
    wrong = []
    for name, (expected, keywords) in FAULTS.items():
        model = model_of()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        given = keywords(model)
        config = config_of(stage) | given.pop("config", {})
        optimizer = given.get("optimizer")
        params = list(optimizer.param_groups[0]["params"]) if isinstance(optimizer, Optimizer) else []
        with pytest.raises(expected):
            shoal.initialize(model=model, config=config, **given)
        if not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)):
            wrong.append(f"{name}: the weights changed")
        if isinstance(optimizer, Optimizer) and any(a is not b for a, b in zip(
                params, optimizer.param_groups[0]["params"], strict=True)):
            wrong.append(f"{name}: the optimizer's parameters changed")
        model(torch.randn(2, WIDTH)).sum().backward()
        if any(parameter.grad is None for parameter in model.parameters()):
            wrong.append(f"{name}: a hook is left")
        model.zero_grad()
        train(shoal.initialize(model=model, config=config_of(stage, optimizer={"type": "Adam"}))[0])
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_after_a_failed_initialize_the_same_objects_can_be_used_again(stage: int) -> None:
    assert run_ranks(2, failed_then_trained, stage) == [[], []]


def by_instance_function_and_name() -> list[str]:
    wrong = []
    for kind in ELEMENTWISE:
        found = []
        for way in ("instance", "function", "name"):
            model = model_of()
            given: dict[str, Any] = {"instance": {"optimizer": kind(model.parameters(), lr=1e-2)},
                                     "function": {"optimizer": lambda groups, kind=kind: kind(groups, lr=1e-2)},
                                     "name": {}}[way]
            named = {} if way != "name" else {"optimizer": {"type": kind.__name__, "params": {
                "lr": 1e-2, **({"torch_adam": True} if kind in (Adam, AdamW) else {}),
                **({"adam_w_mode": False} if kind is Adam else {})}}}
            engine = shoal.initialize(model=model, config=config_of(2, **named), **given)[0]
            train(engine, 3)
            found.append(weights(engine))
        for way, other in zip(("function", "name"), found[1:], strict=True):
            if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(found[0], other, strict=True)):
                wrong.append(f"{kind.__name__} by {way}")
    return wrong


def test_elementwise_optimizers_train_the_same_however_they_are_given() -> None:
    assert run_ranks(2, by_instance_function_and_name)[0] == []


def refused_loads(folder: str) -> list[str]:
    saved = shoal.initialize(model=model_of(4), config=config_of(2, optimizer={"type": "SGD", "params": {
        "lr": 0.1, "momentum": 0.9}}))[0]
    train(saved, 2)
    saved.save_checkpoint(folder, tag="a")
    saved.wait_for_checkpoint()
    wrong = []
    cases: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
        ("2 parameters that this model has not, the first is '3.weight'", 3, {"type": "SGD", "params": {"lr": 0.1}}, {}),
        ("holds the state of SGD, and this engine steps by AdamW", 4, {"type": "AdamW"}, {}),
    ]
    for expected, layers, optimizer, keywords in cases:
        engine = shoal.initialize(model=model_of(layers), config=config_of(1, optimizer=optimizer))[0]
        train(engine)
        before = weights(engine)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder, **keywords)
        if expected not in str(caught.value):
            wrong.append(str(caught.value))
        if engine.global_steps != 1 or not all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True)):
            wrong.append(f"{expected}: something changed")
        engine.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False)
        if not all(torch.equal(a, b) for a, b in zip(weights(engine), weights(saved), strict=False)):
            wrong.append(f"{expected}: the weights were not loaded")
    return wrong


def test_a_checkpoint_that_does_not_fit_is_refused_before_any_change(tmp_path: Path) -> None:
    assert run_ranks(2, refused_loads, str(tmp_path))[0] == []


def loaded_parts(folder: str) -> dict[str, Any]:
    named = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "scheduler": {"type": "WarmupLR", "params": {
        "warmup_num_steps": 100}}}
    saved = shoal.initialize(model=model_of(), config=config_of(2, **named))[0]
    train(saved, 3)
    saved.save_checkpoint(folder, tag=7, client_state={"note": "x"})
    saved.save_checkpoint(folder, tag="unnamed", save_latest=False)
    saved.wait_for_checkpoint()
    found: dict[str, Any] = {"latest": (Path(folder) / "latest").read_text().strip()}
    for name, keywords in {"whole": {}, "module": {"load_module_only": True}, "weights": {"load_optimizer_states": False},
                           "no schedule": {"load_lr_scheduler_states": False}, "tag": {"tag": "unnamed"}}.items():
        engine = shoal.initialize(model=model_of(), config=config_of(1, **named))[0]
        path, client = engine.load_checkpoint(folder, **keywords)
        found[name] = (Path(path or "").name, client, engine.global_steps, len(engine.optimizer.state) > 0,
                       engine.lr_scheduler.state_dict() == saved.lr_scheduler.state_dict(),
                       all(torch.equal(a, b) for a, b in zip(weights(engine), weights(saved), strict=True)))
    return found


def test_each_keyword_of_load_checkpoint_selects_its_part(tmp_path: Path) -> None:
    assert run_ranks(2, loaded_parts, str(tmp_path))[0] == {
        "latest": "7", "whole": ("7", {"note": "x"}, 3, True, True, True),
        "module": ("7", {"note": "x"}, 0, False, False, True),
        "weights": ("7", {"note": "x"}, 3, False, True, True), "no schedule": ("7", {"note": "x"}, 3, True, False, True),
        "tag": ("unnamed", {}, 3, True, True, True)}


def unshared(folder: str) -> str:
    engine = shoal.initialize(model=model_of(), config=config_of(1, optimizer={"type": "Adam"}))[0]
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder if dist.get_rank() == 0 else f"{folder}/elsewhere")
    return str(caught.value)


def test_a_folder_that_one_rank_cannot_see_raises_on_all_ranks(tmp_path: Path) -> None:
    for error in run_ranks(2, unshared, str(tmp_path)):
        assert "only ranks [0] see a file 'latest'" in error


class Cable(torch.autograd.Function):
    """The identity; raises in backward when told to."""

    broken = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Cable.broken:
            raise ValueError("the cable was pulled")
        return gradient


class Cabled(nn.Module):
    """Layers with a `Cable` in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(Cable.apply(x) if index == 2 else x)
        return x


def interrupted(stage: int) -> bool:
    found = []
    for breaks in (False, True):
        torch.manual_seed(0)
        engine = shoal.initialize(model=Cabled(), config=config_of(stage, optimizer={"type": "Adam"}))[0]
        train(engine, 2)
        if breaks:
            Cable.broken = True
            with pytest.raises(ValueError, match="the cable was pulled"):
                train(engine)
            Cable.broken = False
            engine.zero_grad()
        train(engine, 2)
        found.append(weights(engine))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("stage", range(4))
def test_a_backward_that_fails_on_all_ranks_leaves_no_gradients(stage: int) -> None:
    assert run_ranks(2, interrupted, stage) == [True, True]


def plateau() -> list[float]:
    engine = shoal.initialize(model=model_of(), config=config_of(optimizer={"type": "SGD", "params": {"lr": 1.0}}),
                              lr_scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0))[0]
    rates = []
    for metrics in (None, 1.0, 2.0):
        engine.backward(engine(torch.randn(2, WIDTH)).pow(2).mean())
        engine.step(lr_kwargs=None if metrics is None else {"metrics": metrics})
        rates.append(engine.get_lr()[0])
    engine.lr_scheduler.step(3.0)
    return [*rates, engine.get_lr()[0]]


def test_a_plateau_schedule_advances_with_metrics_or_by_hand() -> None:
    assert run_ranks(1, plateau)[0] == pytest.approx([1.0, 1.0, 0.1, 0.01])


class OwnPlateau:
    """A schedule of a library, which derives from no class of torch and needs metrics."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, metrics: float, epoch: int | None = None) -> None:
        self.optimizer.param_groups[0]["lr"] = metrics

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def metrics_of_a_library() -> tuple[list[float], list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shoal").addHandler(handler)
    engine = shoal.initialize(model=model_of(), config=config_of(optimizer={"type": "SGD", "params": {"lr": 1.0}}),
                              lr_scheduler=OwnPlateau)[0]
    rates = []
    for lr_kwargs in (None, {"metrics": 0.5}):
        engine.backward(engine(torch.randn(2, WIDTH)).pow(2).mean())
        engine.step(lr_kwargs=lr_kwargs)
        rates.append(engine.get_lr()[0])
    return rates, [text for text in said if text.startswith("scheduler:")]


class LoosePlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Its signature requires nothing."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        super().step(*args, **kwargs)


class KeywordsOnly:
    def step(*args: Any, metrics: float) -> None: ...


def test_what_a_schedule_requires_is_read_from_its_class() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedules = torch.optim.lr_scheduler
    assert required_arguments(LoosePlateau(optimizer)) == required_arguments(schedules.ReduceLROnPlateau(optimizer)) == [
        "metrics"] == required_arguments(cast(AnySchedule, KeywordsOnly()))
    assert required_arguments(schedules.StepLR(optimizer, 1)) == []
    assert required_arguments(cast(AnySchedule, SimpleNamespace(step=lambda loss: None))) == ["loss"]


def test_a_schedule_that_needs_metrics_warns_and_waits_for_them() -> None:
    rates, (warning,) = run_ranks(1, metrics_of_a_library)[0]
    assert rates == [1.0, 0.5]
    assert "does not advance a OwnPlateau, whose step requires metrics: call engine.step(lr_kwargs={'metrics':" in warning


class Buffered(nn.Module):
    """Buffers that each rank draws for itself, and a parameter that no optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.loose = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("noise", torch.randn(WIDTH, 2).t())
        self.register_buffer("mask", torch.randn(WIDTH) > 0)
        self.register_buffer("count", torch.randint(0, 1000, ()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.loose


def buffers_and_loose(stage: int) -> tuple[list[Any], bool]:
    torch.manual_seed(dist.get_rank())
    model = Buffered()
    engine = shoal.initialize(model=model, model_parameters=model.layer.parameters(),
                              config=config_of(stage, optimizer={"type": "Adam"}))[0]
    train(engine, 2)
    return [buffer.tolist() for buffer in model.buffers()], model.loose.grad is None


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_come_from_rank_0_and_unstepped_parameters_keep_no_grad(stage: int) -> None:
    first, second = run_ranks(2, buffers_and_loose, stage)
    assert first == second
    assert first[1]


def tags() -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    numbers = [Communicator(group, timeout=5).register() for _ in range(3)]
    return [Label(kind="reduce", unit="x", index=number).tag for number in numbers]


def test_engines_of_one_group_use_different_tags() -> None:
    assert len(set(run_ranks(1, tags)[0])) == 3


def written_and_dropped(stage: int) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))  # large enough to be paged
    shoal.initialize(model=model, config=config_of(stage, optimizer={"type": "Adam"}))
    with shoal.gathered(model):
        before = model[0].weight.detach().clone()
        with torch.no_grad():
            model[0].weight.zero_()
    with shoal.gathered(model):
        return torch.equal(model[0].weight, before)


def test_writes_without_modifier_rank_are_dropped() -> None:
    assert run_ranks(2, written_and_dropped, 3) == [True, True]


def test_log_lines_reach_stderr_without_logging_configuration() -> None:
    code = ("import torch, shoal\n"
            "engine = shoal.initialize(model=torch.nn.Linear(2, 2), config={'train_batch_size': 1, 'steps_per_print': 1, "
            "'optimizer': {'type': 'Adam', 'params': {'lr': 0.5}}})[0]\n"
            "engine.backward(engine(torch.ones(1, 2)).sum()); engine.step()\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[shoal, rank 0] INFO: step=1, skipped=0, lr=[0.5]" in done.stderr


def test_log_lines_go_to_the_handlers_of_the_application(capsys: pytest.CaptureFixture[str],
                                                         caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shoal"):
        logging.getLogger("shoal").warning("once")
    assert caplog.messages == ["once"]
    assert capsys.readouterr().err == ""
