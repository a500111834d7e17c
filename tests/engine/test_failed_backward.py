"""After an exception within `loss.backward()` a script discards the gradients and goes on, as in plain PyTorch."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.testing import run_ranks

STEPS, FAILS = 5, (1, 3)


class Failure(Exception):
    """The exception of a hook."""


def train(stage: int | None, how: str, whole: bool) -> tuple[list[float], list[Tensor]]:
    """Train by the calls of plain PyTorch, with an engine of `stage` or without; return the losses and the weights.

    The backward of some steps fails halfway. Then gradients are discarded `how`, and its batch is skipped. `whole`: the loss
    is of the model's own call, not of parts of it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = None
    if stage is not None:
        engine = shoal.initialize(model=model, optimizer=optimizer, config={
            "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "timeout": 20,
            "zero_optimization": {"stage": stage}})[0]
    data, losses = torch.Generator().manual_seed(1), list[float]()
    failing = False

    def fail(gradient: Tensor) -> None:
        if failing:
            raise Failure

    if whole:
        model[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=data)
        failing = step in FAILS
        if whole:
            output = model(x)
        else:
            hidden = model[:2](x)
            hidden.register_hook(fail)
            output = model[2:](hidden)
        loss = (output - x).square().mean()
        try:
            loss.backward()
        except Failure:
            if how == "optimizer":
                optimizer.zero_grad()
            elif how == "engine":
                (engine or optimizer).zero_grad()
            elif how == "module":
                model.zero_grad()
            else:
                for p in model.parameters():
                    p.grad = None
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with shoal.gathered(model):
        return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["optimizer", "engine", "module", "parameters"])
def test_training_goes_on_as_in_plain_pytorch(how: str, ranks: int) -> None:
    for whole in (False, True):
        losses, weights = train(None, how, whole)
        for stage in range(4):
            for found, trained in run_ranks(ranks, train, stage, how, whole):
                assert found == losses, (stage, whole)
                assert all(torch.equal(a, b) for a, b in zip(trained, weights, strict=True)), (stage, whole)


def step_on_a_part(stage: int) -> list[str]:
    """Return what a step on the gradients of a failed backward raises, and what the next backward warns of."""
    told: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler(logging.WARNING))
    handler.emit = lambda record: told.append(record.getMessage())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shoal.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}})

    def fail(gradient: Tensor) -> None:
        raise Failure

    model[0].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(Failure):
        model(torch.ones(4, 8)).sum().backward()
    with pytest.raises(UsageError) as raised:
        optimizer.step()
    model[0]._forward_hooks.clear()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    return [str(raised.value), *told]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_gradients_of_a_failed_backward_are_not_stepped(stage: int) -> None:
    raised, told = run_ranks(1, step_on_a_part, stage)[0]
    assert raised.startswith("step: the backward before it has failed, and left gradients of a part of the model; call")
    assert "the gradients that it left are discarded, with those of its accumulation" in told


def accumulate_around_a_failure(stage: int | None) -> list[Tensor]:
    """Step on two backward passes, between which `autograd.grad` fails, which gives parameters no gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        shoal.initialize(model=model, optimizer=optimizer, config={
            "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0,
            "zero_optimization": {"stage": stage}})

    def fail(gradient: Tensor) -> None:
        raise Failure

    for number in range(2):
        x = torch.full((4, 8), 1.0 + number, requires_grad=True)
        loss = model(x).square().sum()
        if number:
            x.register_hook(fail)
            with pytest.raises(Failure):
                torch.autograd.grad(loss, x, retain_graph=True)
            loss = model(x.detach()).square().sum()
        loss.backward()
    optimizer.step()
    with shoal.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_failed_pass_without_gradients_of_weights_discards_none(stage: int) -> None:
    expected = accumulate_around_a_failure(None)
    for weights in run_ranks(2, accumulate_around_a_failure, stage):
        for a, b in zip(weights, expected, strict=True):
            torch.testing.assert_close(a, b)
