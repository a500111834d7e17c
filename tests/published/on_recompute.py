"""Activation checkpointing: equal outputs and gradients for every kind of argument, the random state, settings."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from .case import case, raised

checkpointing = deepspeed.checkpointing


def start() -> None:
    deepspeed.init_distributed("gloo")
    checkpointing.configure(None, partition_activations=False)


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


WAYS = ["checkpoint", "non_reentrant_checkpoint"]


def both(run: Any, *arguments: Any, way: str = "checkpoint", **keywords: Any) -> Any:
    """Return the outputs and gradients with recompute beside those without."""
    start()
    found: list[Any] = []
    for call in (getattr(checkpointing, way), lambda f, *a, **k: f(*a, **k)):
        inputs = [
            given.detach().clone().requires_grad_(given.requires_grad) if isinstance(given, torch.Tensor) else given
            for given in arguments
        ]
        out = call(run, *inputs, **keywords)
        outs = [
            each
            for each in (out if isinstance(out, tuple) else (out,))
            if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        if outs:
            sum(each.sum() * (index + 1) for index, each in enumerate(outs)).backward()
        found.append(
            [
                type(out).__name__,
                [each for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, torch.Tensor)],
                [given.grad for given in inputs if isinstance(given, torch.Tensor)],
            ]
        )
    return found


def leaf(*shape: int) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randn(*shape, requires_grad=True)


ARGUMENTS: dict[str, tuple[Any, list[Any]]] = {
    "one": (lambda x: x.square(), [leaf(3)]),
    "two": (lambda x, y: x * y, [leaf(3), leaf(3)]),
    "tuple": (lambda x: (x * 2, x * 3), [leaf(3)]),
    "none": (lambda x, y: x * 2, [leaf(3), None]),
    "number": (lambda x, y: x * y, [leaf(3), 4]),
    "flag": (lambda x, y: x * 2 if y else x, [leaf(3), True]),
    "mask": (lambda x, y: x * y, [leaf(3), torch.tensor([True, False, True])]),
    "ints": (lambda x, y: x[y], [leaf(3), torch.tensor([0, 2])]),
    "text": (lambda x, y: x * len(y), [leaf(3), "abc"]),
    "list": (lambda x, y: x * y[0], [leaf(3), [2, 3]]),
    "dict": (lambda x, y: x * y["a"], [leaf(3), {"a": 2}]),
    "detached": (lambda x, y: x * y, [leaf(3), torch.ones(3)]),
    "out_none": (lambda x: (x * 2, None), [leaf(3)]),
    "out_flag": (lambda x: (x * 2, True), [leaf(3)]),
    "out_detached": (lambda x: (x * 2, x.detach()), [leaf(3)]),
    "out_ints": (lambda x: (x * 2, torch.arange(3)), [leaf(3)]),
    "tuple_in": (lambda x, y: x * y[0], [leaf(3), (2.0, 3)]),
    "float16": (lambda x: x.half().float() * 2, [leaf(3)]),
    "many": (lambda a, b, c, d: a * b + c * d, [leaf(2), leaf(2), leaf(2), leaf(2)]),
}


@case(which=list(ARGUMENTS), way=WAYS)
def arguments(which: str, way: str) -> Any:
    run, given = ARGUMENTS[which]
    return both(run, *given, way=way)


@case(way=WAYS)
def modules(way: str) -> Any:
    found: list[Any] = []
    for call in (getattr(checkpointing, way), lambda f, *a: f(*a)):
        start()
        layer, given = module(), leaf(2, 4)
        call(layer, given).sum().backward()
        found.append([given.grad, [parameter.grad for parameter in layer.parameters()]])
    return found


@case(way=WAYS, p=[0.1, 0.5])
def dropout(way: str, p: float) -> Any:
    start()
    given = torch.ones(100, requires_grad=True)
    torch.manual_seed(1)
    out = getattr(checkpointing, way)(lambda x: nn.functional.dropout(x * 2, p), given)
    out.sum().backward()
    return [torch.equal((out != 0), (given.grad != 0)), torch.rand(1)]


@case(way=WAYS)
def without_gradients(way: str) -> Any:
    start()
    with torch.no_grad():
        return getattr(checkpointing, way)(lambda x: x * 2, leaf(3))


@case(way=WAYS)
def nested(way: str) -> Any:
    start()
    call = getattr(checkpointing, way)
    given = leaf(3)
    call(lambda x: call(lambda y: y.square(), x) * 2, given).sum().backward()
    return given.grad


@case()
def chain() -> Any:
    start()
    given = leaf(2, 4)
    value = given
    layers = [module() for _ in range(3)]
    for layer in layers:
        value = checkpointing.checkpoint(layer, value)
    value.square().sum().backward()
    return [value, given.grad]


@case(
    keyword=[
        "partition_activations",
        "contiguous_checkpointing",
        "num_checkpoints",
        "checkpoint_in_cpu",
        "synchronize",
        "profile",
    ]
)
def configured(keyword: str) -> Any:
    deepspeed.init_distributed("gloo")
    before = checkpointing.is_configured()
    failed = raised(lambda: checkpointing.configure(None, **{keyword: 2 if keyword == "num_checkpoints" else True}))
    return [before, failed, checkpointing.is_configured()]


@case(
    section=[
        {},
        {"partition_activations": True},
        {"cpu_checkpointing": True},
        {"contiguous_memory_optimization": True},
        {"number_checkpoints": 2},
    ]
)
def configured_by_file(section: dict[str, Any]) -> Any:
    deepspeed.init_distributed("gloo")
    failed = raised(
        lambda: checkpointing.configure(None, deepspeed_config={"train_batch_size": 1, "activation_checkpointing": section})
    )
    if failed["raised"]:
        return failed
    given = leaf(2, 4)
    checkpointing.checkpoint(lambda x: x.square(), given).sum().backward()
    return [given.grad, checkpointing.is_configured()]


@case(cpu=[True, False])
def in_host_memory(cpu: bool) -> Any:
    deepspeed.init_distributed("gloo")
    checkpointing.configure(None, checkpoint_in_cpu=cpu)
    given = leaf(2, 4)
    checkpointing.checkpoint(module(), given).sum().backward()
    return given.grad


@case()
def generators() -> Any:
    start()
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("mine", 5)
    twice = [raised(lambda: tracker.add("mine", 6))["raised"] != [], raised(lambda: tracker.add("other", 5))["raised"] != []]

    def fork_unknown() -> None:
        with tracker.fork("nothing"):
            pass

    names = sorted(tracker.get_states())
    torch.manual_seed(1)
    with tracker.fork("mine"):
        first = torch.rand(2)
    after = torch.rand(2)
    torch.manual_seed(1)
    return [twice, raised(fork_unknown)["raised"] != [], names, torch.equal(after, torch.rand(2)), first.shape[0]]


@case(seed=[1, 1234])
def seeds(seed: int) -> Any:
    start()
    checkpointing.model_parallel_cuda_manual_seed(seed)
    outside = torch.rand(2)
    with checkpointing.get_cuda_rng_tracker().fork():
        inside = torch.rand(2)
    torch.manual_seed(seed)
    return [
        torch.equal(outside, torch.rand(2)),
        sorted(checkpointing.get_cuda_rng_tracker().get_states()),
        torch.equal(inside, outside),
    ]


@case(stage=[0, 1, 2, 3], way=WAYS)
def in_an_engine(stage: int, way: str) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.two(getattr(checkpointing, way)(self.one, value))

    start()
    engine = deepspeed.initialize(
        model=Net(),
        config={
            "train_batch_size": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
        },
    )[0]
    losses: list[float] = []
    for index in range(3):
        given = (torch.ones(2, 4) * (index + 1)).requires_grad_()
        loss = engine(given).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


@case()
def setters() -> Any:
    start()
    checkpointing.set_num_layers(3)
    checkpointing.partition_activations_in_checkpoint(False)
    checkpointing.reset()
    return True
