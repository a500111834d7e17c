"""The operations of programs: each is called on both trainings with the same random numbers, and returns tensors to compare.

An operation that calls `backward` or `step` counts as a microbatch, so that accumulation goes on across operations. What is
read outside of passes raises `ReleasedError` at stage 3 and is not compared.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.errors import ReleasedError

from .model import INPUTS, Trained

Found = Sequence[Tensor]


class Refused(AssertionError):
    """What should have raised did not, or the other way round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a step of a program does to a training."""

    run: Callable[[Trained, Random], Found]
    weight: int
    """How often it is drawn."""


OPERATIONS: dict[str, Operation] = {}


def operation(weight: int = 2) -> Callable[[Callable[[Trained, Random], Found]], Callable[[Trained, Random], Found]]:
    """Register an operation under the name of its function."""
    def register(run: Callable[[Trained, Random], Found]) -> Callable[[Trained, Random], Found]:
        OPERATIONS[run.__name__.replace("_", " ")] = Operation(run=run, weight=weight)
        return run
    return register


def batch(random: Random, width: int = INPUTS) -> Tensor:
    """Return a batch of this rank."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30) + dist.get_rank())
    return torch.randn(3, width, generator=generator)


def loss_of(out: Tensor) -> Tensor:
    return (out - 0.3).square().mean()


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.square().sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return 2 * grad_outputs[0] * ctx.saved_tensors[0]


class _KeptSquare(_Square):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.square().sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return 2 * grad_outputs[0] * ctx.weight


TERMS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda w: w.square().sum(), lambda w: (w + 1).norm(), lambda w: torch.einsum("...i,...i->...", w, w).sum(),
    lambda w: (w.view(-1)[1:] * w.view(-1)[:-1]).sum(), lambda w: w.reshape(-1).outer(w.reshape(-1)).tanh().mean(),
    lambda w: (w.detach() * w).sum(), lambda w: w.exp().mean(), _Square.apply, _KeptSquare.apply)


VIEWS: tuple[Callable[[Tensor], Any], ...] = (lambda w: w.detach(), lambda w: w.view(-1)[1:], lambda w: w.data)
READS: tuple[Callable[[Tensor], Any], ...] = (
    lambda w: w + 1, lambda w: w.sum(), lambda w: w.clone(), lambda w: w.view(-1)[0].item(), lambda w: w.detach().sum())


def some(trained: Trained, random: Random) -> list[nn.Parameter]:
    """Return a few of the parameters."""
    parameters = [*trained.module.parameters()]
    return random.sample(parameters, random.randint(1, 3)) if random.random() < 0.8 else parameters


def term_of(trained: Trained, random: Random) -> Tensor:
    term = random.choice(TERMS)
    return 0.05 * torch.stack([term(weight) for weight in some(trained, random)]).sum()


def chain(trained: Trained, random: Random) -> Tensor:
    """Call submodules one after the other, as a script does."""
    model = trained.module
    x = model.first(batch(random))
    for _ in range(random.randint(1, 3)):
        block = random.choice([*model.blocks])
        for module in random.choice(([block], [block.norm], [block.up, torch.nn.Tanh(), block.down], [model.head[1]],
                                     [model.head])):
            x = module(x)
    return x


def whole(trained: Trained, parameters: Sequence[nn.Parameter] | None = None) -> list[Tensor]:
    """Return the values of weights."""
    with shoal.gathered(trained.module if parameters is None else parameters):
        return [weight.detach().clone() for weight in (trained.module.parameters() if parameters is None else parameters)]


# Passes


@operation(6)
def train(trained: Trained, random: Random) -> Found:
    loss = loss_of(trained.forward(batch(random)))
    trained.backward(loss)
    trained.step()
    return [loss.detach()]


@operation(3)
def train_submodules(trained: Trained, random: Random) -> Found:
    loss = loss_of(chain(trained, random))
    if random.random() < 0.5:
        loss = loss + loss_of(trained.forward(batch(random)))
    trained.backward(loss)
    trained.step()
    return [loss.detach()]


@operation()
def train_twice_through_a_graph(trained: Trained, random: Random) -> Found:
    loss = loss_of(trained.forward(batch(random)))
    trained.backward(loss, retain_graph=True)
    trained.backward(loss)
    trained.step()
    return [loss.detach()]


@operation()
def train_without_sync(trained: Trained, random: Random) -> Found:
    with trained.no_sync():
        trained.backward(loss_of(trained.forward(batch(random))))
    trained.backward(loss_of(trained.forward(batch(random))))
    trained.step()
    return []


@operation()
def begin_a_loss(trained: Trained, random: Random) -> Found:
    out = trained.forward(batch(random)) if random.random() < 0.6 else chain(trained, random)
    trained.losses.append(loss_of(out))
    return [trained.losses[-1].detach()]


@operation()
def finish_losses(trained: Trained, random: Random) -> Found:
    for loss in trained.losses:
        trained.backward(loss)
    if trained.losses:
        trained.step()
    trained.losses.clear()
    return []


@operation()
def drop_losses(trained: Trained, random: Random) -> Found:
    trained.losses.clear()
    gc.collect()
    return []


@operation(3)
def evaluate(trained: Trained, random: Random) -> Found:
    trained.module.eval()
    with torch.no_grad() if random.random() < 0.7 else torch.inference_mode():
        found = [trained.forward(batch(random)), chain(trained, random)]
    trained.module.train()
    return [each.clone() for each in found]


@operation()
def forward_alone(trained: Trained, random: Random) -> Found:
    return [trained.forward(batch(random)).detach(), chain(trained, random).detach()]


@operation(1)
def fail_in_forward(trained: Trained, random: Random) -> Found:
    """Raise within a block, and go on."""
    def fail(*hooked: object) -> None:
        raise KeyError("a mistake of the script")

    block = random.choice([*trained.module.blocks])
    handle = random.choice((block.register_forward_pre_hook, block.down.register_forward_hook))(fail)
    with suppress(KeyError):
        trained.forward(batch(random))
    handle.remove()
    return []


# Weights


@operation(3)
def read_outside(trained: Trained, random: Random) -> Found:
    """Read weights outside of passes: they raise at stage 3, whatever happened before."""
    for weight in some(trained, random):
        whole_here = not trained.sharded or weight.numel() <= trained.persistent
        try:
            random.choice(READS)(weight)
        except ReleasedError:
            if whole_here:
                raise
        else:
            if not whole_here:
                raise Refused(f"a weight of {tuple(weight.shape)} was read outside of passes")
    return []


@operation(3)
def read_within_gathered(trained: Trained, random: Random) -> Found:
    weights, inner = some(trained, random), some(trained, random)
    with shoal.gathered(weights):
        found = [weight.detach().clone() for weight in weights]
        if random.random() < 0.5:
            found += whole(trained, inner)
        found += [weight.sum().detach() for weight in weights]
    return found


@operation(4)
def regularise(trained: Trained, random: Random) -> Found:
    """Add a loss of gathered weights, made before or after the forward; backward within the context or after it."""
    before, within, alone = (random.random() < 0.5 for _ in range(3))
    loss: Tensor | float = 0.0 if alone or before else loss_of(trained.forward(batch(random)))
    with shoal.gathered(trained.module):
        loss = loss + term_of(trained, random)
        if within:
            trained.backward(loss)
    if not within:
        if before:
            loss = loss + loss_of(trained.forward(batch(random)))
        trained.backward(loss)
    trained.step()
    return [loss.detach()]


@operation()
def edit(trained: Trained, random: Random) -> Found:
    factor = random.uniform(0.8, 1.2)
    write = random.choice((lambda weight: weight.mul_(factor), lambda weight: weight.copy_(weight * factor),
                           lambda weight: weight.view(-1)[:1].fill_(factor / 10)))
    trained.edit(some(trained, random), write)
    return []


@operation(1)
def keep_views(trained: Trained, random: Random) -> Found:
    with shoal.gathered(trained.module):
        trained.kept += [random.choice(VIEWS)(weight) for weight in some(trained, random)]
    return []


@operation(1)
def use_kept_views(trained: Trained, random: Random) -> Found:
    """Read tensors that share the memory of weights: their values are promised only on one rank."""
    for each in trained.kept:
        assert each.isfinite().all()
    if random.random() < 0.5:
        trained.kept.clear()
    return []


@operation(1)
def copy_the_model(trained: Trained, random: Random) -> Found:
    with shoal.gathered(trained.module):
        model = copy.deepcopy(trained.module)
    x = batch(random)
    with torch.no_grad():
        return [model(x)]


@operation(1)
def compare_weights(trained: Trained, random: Random) -> Found:
    return whole(trained)


@operation(1)
def freeze(trained: Trained, random: Random) -> Found:
    """Freeze parameters, or train them again."""
    for weight in some(trained, random)[:2]:
        weight.requires_grad_(not weight.requires_grad)
    return []


# Derivatives


@operation()
def penalise_the_slope(trained: Trained, random: Random) -> Found:
    x = batch(random).requires_grad_()
    out = trained.forward(x) if random.random() < 0.6 else chain_of(trained, x, random)
    slope, = torch.autograd.grad(out.tanh().sum(), x, create_graph=True)
    trained.backward(loss_of(out) + 0.1 * (slope.square().sum() - 1).square())
    trained.step()
    return [slope.detach()]


def chain_of(trained: Trained, x: Tensor, random: Random) -> Tensor:
    x = trained.module.first(x)
    for block in random.sample([*trained.module.blocks], 2):
        x = block(x)
    return x


@operation()
def ask_for_gradients_of_weights(trained: Trained, random: Random) -> Found:
    """Ask for gradients without training by them, or train by their norm."""
    graph = random.random() < 0.4
    out = trained.forward(batch(random))
    found = torch.autograd.grad(loss_of(out), [w for w in some(trained, random) if w.requires_grad] or [out],
                                create_graph=graph, retain_graph=True, allow_unused=True)
    loss = loss_of(out)
    if graph:
        loss = loss + 0.05 * sum(each.square().sum() for each in found if each is not None)
    trained.backward(loss)
    trained.step()
    return [each.detach().clone() for each in found if each is not None]


@operation()
def ask_for_gradients_of_inputs(trained: Trained, random: Random) -> Found:
    x = batch(random).requires_grad_()
    return torch.autograd.grad(loss_of(trained.forward(x)), x)


@operation(1)
def penalise_weights_twice(trained: Trained, random: Random) -> Found:
    """Take a second derivative of a loss of gathered weights alone."""
    weights = [weight for weight in some(trained, random) if weight.requires_grad]
    if not weights:
        return []
    with shoal.gathered(trained.module):
        loss = torch.stack([weight.pow(3).sum() for weight in weights]).sum()
    found = torch.autograd.grad(loss, weights, create_graph=True)
    trained.backward(0.01 * torch.stack([each.square().sum() for each in found]).sum())
    trained.step()
    return [each.detach().clone() for each in found]


# Hooks


def _log_and_scale(log: list[Tensor], factor: float, gradient: Tensor) -> Tensor:
    log.append(gradient.detach().clone())
    return gradient * factor


@operation()
def hook_gradients(trained: Trained, random: Random) -> Found:
    """Register hooks that see gradients, and some that change them."""
    factor = random.uniform(0.5, 1.5)
    for weight in [weight for weight in some(trained, random) if weight.requires_grad]:
        if random.random() < 0.5:
            trained.handles.append(weight.register_hook(partial(_log_and_scale, trained.log, factor)))
        else:
            trained.handles.append(weight.register_post_accumulate_grad_hook(
                lambda parameter: trained.log.append(torch.tensor(float(parameter.grad is not None)))))
    return []


@operation(1)
def hook_modules(trained: Trained, random: Random) -> Found:
    """Register hooks on modules that read weights of others, or of their own."""
    model, weight = trained.module, random.choice([*trained.module.parameters()])
    module = random.choice([model, *model.blocks, model.first, model.head])
    if random.random() < 0.5:
        trained.handles.append(module.register_forward_hook(
            lambda module, args, out: out * (1 + 0.01 * weight.square().mean())))
    else:
        trained.handles.append(module.register_full_backward_hook(
            lambda module, inputs, outputs: trained.log.append(weight.detach().norm().clone())))
    return []


@operation(1)
def remove_hooks(trained: Trained, random: Random) -> Found:
    for handle in trained.handles:
        handle.remove()
    trained.handles.clear()
    return []


@operation(3)
def compare_what_hooks_saw(trained: Trained, random: Random) -> Found:
    found = [*trained.log]
    trained.log.clear()
    return found


# Checkpoints


@operation(1)
def save(trained: Trained, random: Random) -> Found:
    if trained.at_boundary:
        trained.save()
    return []


@operation(1)
def load(trained: Trained, random: Random) -> Found:
    if trained.at_boundary and trained.has_saved:
        trained.load()
    return []

