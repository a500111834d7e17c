"""Twelve kinds of models train at stages 1 to 3 as plain PyTorch does, bit by bit in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import shoal
from shoal.engine.engine import Engine
from shoal.testing import run_ranks

from .kinds import KINDS, Discriminator, Generator, noise_and_samples, truth_loss
from .trained import weights

RANKS, STEPS, LR = 2, 2, 0.125
STAGES = (1, 2, 3)

Trained = tuple[list[Tensor], dict[str, Tensor]]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return build()


def initialized(net: nn.Module, stage: int) -> Engine:
    config = {"train_micro_batch_size_per_gpu": 2, "timeout": 20, "gradient_clipping": 0.0,
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    return shoal.initialize(model=net, optimizer=SGD([p for p in net.parameters() if p.requires_grad], lr=LR),
                            config=config)[0]


def step_by_mean(replicas: Sequence[nn.Module], optimizers: Iterable[Optimizer]) -> None:
    """Step the replicas of all ranks by the mean of their gradients, and clear these."""
    for copies in zip(*(replica.parameters() for replica in replicas), strict=True):
        gradients = [copy.grad for copy in copies if copy.grad is not None]
        if gradients:
            mean = torch.stack([torch.zeros_like(copies[0]) if copy.grad is None else copy.grad for copy in copies]).mean(0)
            for copy in copies:
                copy.grad = mean.clone()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def plain(kind: str, rank: int) -> Trained:
    """Train one replica a rank in this process; return the losses of `rank`, and the weights."""
    replicas = [seeded(KINDS[kind].build) for _ in range(RANKS)]
    optimizers = [SGD(replica.parameters(), lr=LR) for replica in replicas]
    losses = []
    for step in range(STEPS):
        for of_rank, replica in enumerate(replicas):
            loss = replica(**KINDS[kind].batch(step, of_rank))["loss"]
            loss.backward()
            if of_rank == rank:
                losses.append(loss.detach())
        step_by_mean(replicas, optimizers)
    return losses, dict(replicas[rank].named_parameters())


def sharded(kind: str, stage: int) -> Trained:
    engine = initialized(seeded(KINDS[kind].build), stage)
    losses = []
    for step in range(STEPS):
        loss = engine(**KINDS[kind].batch(step, engine.global_rank))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    trained = weights(engine)
    engine.destroy()
    return losses, trained


def plain_gan(rank: int) -> Trained:
    generators, discriminators = ([seeded(kind) for _ in range(RANKS)] for kind in (Generator, Discriminator))
    by_kind = [(nets, [SGD(net.parameters(), lr=LR) for net in nets]) for nets in (discriminators, generators)]
    losses = []
    for step in range(STEPS):
        for of_rank, (generator, discriminator) in enumerate(zip(generators, discriminators, strict=True)):
            noise, samples = noise_and_samples(step, of_rank)
            loss = (truth_loss(discriminator(samples), real=True)
                    + truth_loss(discriminator(generator(noise).detach()), real=False))
            loss.backward()
            losses += [loss.detach()] if of_rank == rank else []
        step_by_mean(*by_kind[0])
        for of_rank, (generator, discriminator) in enumerate(zip(generators, discriminators, strict=True)):
            loss = truth_loss(discriminator(generator(noise_and_samples(step, of_rank)[0])), real=True)
            loss.backward()
            losses += [loss.detach()] if of_rank == rank else []
        step_by_mean(*by_kind[1])
        for discriminator in discriminators:
            discriminator.zero_grad()
    return losses, named_gan(dict(generators[rank].named_parameters()), dict(discriminators[rank].named_parameters()))


def sharded_gan(stage: int) -> Trained:
    generator, discriminator = (initialized(seeded(kind), stage) for kind in (Generator, Discriminator))
    losses = []
    for step in range(STEPS):
        noise, samples = noise_and_samples(step, generator.global_rank)
        loss = (truth_loss(discriminator(samples), real=True)
                + truth_loss(discriminator(generator(noise).detach()), real=False))
        discriminator.backward(loss)
        discriminator.step()
        losses.append(loss.detach())
        loss = truth_loss(discriminator(generator(noise)), real=True)
        generator.backward(loss)
        generator.step()
        discriminator.zero_grad()
        losses.append(loss.detach())
    trained = named_gan(weights(generator), weights(discriminator))
    generator.destroy()
    discriminator.destroy()
    return losses, trained


def named_gan(generator: dict[str, Tensor], discriminator: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"generator.{name}": value for name, value in generator.items()} | {
        f"discriminator.{name}": value for name, value in discriminator.items()}


def differences(one: Trained, other: Trained) -> list[str]:
    """Return what differs, by name, with its largest difference."""
    losses = {f"loss {number}": pair for number, pair in enumerate(zip(one[0], other[0], strict=True))}
    assert one[1].keys() == other[1].keys()
    pairs = losses | {name: (value, other[1][name]) for name, value in one[1].items()}
    return [f"{name}: {(a - b).abs().max().item():.2g}" for name, (a, b) in pairs.items() if not torch.equal(a, b)]


def compared(kinds: Sequence[str]) -> dict[str, list[str]]:
    """Return for each kind and stage what differs from plain PyTorch on this rank."""
    rank, found = dist.get_rank(), {}
    for kind in kinds:
        expected = plain_gan(rank) if kind == "GAN" else plain(kind, rank)
        for stage in STAGES:
            got = sharded_gan(stage) if kind == "GAN" else sharded(kind, stage)
            found[f"{kind} at stage {stage}"] = differences(expected, got)
    return found


@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("part", [0, 1])
def test_twelve_kinds_of_models_train_as_plain_pytorch_does(part: int) -> None:
    kinds = [*KINDS, "GAN"][part::2]
    for found in run_ranks(RANKS, compared, kinds):
        assert len(found) == len(kinds) * len(STAGES)
        assert {case: different for case, different in found.items() if different} == {}
