"""Scripts in the manner of the published tutorials train as plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal.compat.deepspeed as deepspeed
from shoal.compat.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from shoal.testing import run_ranks

RANKS, STEPS, SAMPLES, NOISE, WIDTH = 2, 3, 4, 3, 5
ADAM = {"lr": 0.02, "betas": (0.5, 0.999)}


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(NOISE, 6), nn.ReLU(inplace=True), nn.Linear(6, WIDTH), nn.Tanh())
    return generator, nn.Sequential(nn.Linear(WIDTH, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1), nn.Sigmoid())


def drawn(step: int, rank: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(SAMPLES, WIDTH, generator=numbers), torch.randn(SAMPLES, NOISE, generator=numbers)


def judged(discriminator: Callable[[Tensor], Tensor], samples: Tensor, label: float) -> Tensor:
    return nn.functional.binary_cross_entropy(discriminator(samples), torch.full((len(samples), 1), label))


def adversaries(stage: int) -> list[float]:
    """Train two engines on each other; the gradients that a step leaves in the other model are discarded by its module."""
    generator, discriminator = networks()
    engines: list[Any] = []
    for model in (generator, discriminator):
        engines.append(deepspeed.initialize(
            model=model, optimizer=torch.optim.Adam(model.parameters(), **ADAM), config={
                "train_batch_size": RANKS * SAMPLES, "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0])
    makes, judges = engines
    losses: list[float] = []
    for step in range(STEPS):
        real, noise = drawn(step, dist.get_rank())
        discriminator.zero_grad()
        judges.backward(judged(judges, real, 1.0))
        fake = makes(noise)
        judges.backward(judged(judges, fake.detach(), 0.0))
        judges.step()
        generator.zero_grad()
        loss = judged(judges, fake, 1.0)
        makes.backward(loss)
        makes.step()
        losses.append(float(loss.detach()))
    return losses


def plain_adversaries() -> list[list[float]]:
    """The same on whole models, one for each rank, whose gradients are averaged."""
    made, judging = ([copy.deepcopy(model) for _ in range(RANKS)] for model in networks())
    optimizers = [[torch.optim.Adam(model.parameters(), **ADAM) for model in models] for models in (made, judging)]

    def step(models: list[nn.Module], steppers: list[torch.optim.Adam]) -> None:
        for same in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([each.grad for each in same if each.grad is not None]).mean(0)
            for each in same:
                each.grad = mean.clone()
        for stepper in steppers:
            stepper.step()

    losses: list[list[float]] = [[] for _ in range(RANKS)]
    for number in range(STEPS):
        fakes: list[Tensor] = []
        for rank in range(RANKS):
            real, noise = drawn(number, rank)
            judging[rank].zero_grad()
            judged(judging[rank], real, 1.0).backward()
            fakes.append(made[rank](noise))
            judged(judging[rank], fakes[rank].detach(), 0.0).backward()
        step(judging, optimizers[1])
        for rank in range(RANKS):
            made[rank].zero_grad()
            loss = judged(judging[rank], fakes[rank], 1.0)
            loss.backward()
            losses[rank].append(float(loss.detach()))
        step(made, optimizers[0])
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_adversaries_train_as_in_plain_pytorch(stage: int) -> None:
    for found, wanted in zip(run_ranks(RANKS, adversaries, stage), plain_adversaries(), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


def averaged() -> list[list[float]]:
    """Average the weights of a model after each step, gathering each parameter that its status calls absent."""
    model, _ = networks()
    engine = deepspeed.initialize(model=model, config={
        "train_batch_size": RANKS * SAMPLES, "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})[0]
    found: list[list[float]] = []
    for step in range(STEPS):
        engine.backward(engine(drawn(step, 0)[1]).square().mean())
        engine.step()
        found.append([])
        for parameter in engine.module.parameters():
            absent = [each for each in (parameter,) if hasattr(each, "ds_id")
                      and each.ds_status == ZeroParamStatus.NOT_AVAILABLE]
            with deepspeed.zero.GatheredParameters(absent, enabled=len(absent) > 0):
                found[-1].append(float(parameter.data.cpu().mean()))
    return found


def test_scripts_gather_what_its_status_calls_absent() -> None:
    torch.manual_seed(1)
    plain, _ = networks()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)
    wanted: list[list[float]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        plain(drawn(step, 0)[1]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        wanted.append([float(parameter.detach().mean()) for parameter in plain.parameters()])
    for found in run_ranks(RANKS, averaged):
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
