"""Idioms of plain PyTorch train alike at every stage: losses of gathered weights, submodules, second derivatives, hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import ReleasedError, UsageError
from shoal.testing import run_ranks

WIDTH = 8
CASES = {1: ("0", "2 nvme", "3", "3 nvme"), 2: ("2", "3", "3 cpu")}
"""By the number of ranks: a stage, and the tier of weights and state."""


class Model(nn.Module):
    """Blocks, and parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.scale


class Cube(torch.autograd.Function):
    """Keeps the weight as autograd would have it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.pow(3).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return 3 * grad_outputs[0] * ctx.saved_tensors[0] ** 2


class KeptCube(Cube):
    """Keeps the parameter itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.pow(3).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return 3 * grad_outputs[0] * ctx.weight ** 2


TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda w: w.square().sum(), "norm": lambda w: w.norm(), "einsum": lambda w: torch.einsum("ij,ij->", w, w * w),
    "views": lambda w: (w.t()[1:] @ w[:, 0]).sum(), "function": Cube.apply, "kept parameter": KeptCube.apply}
"""Terms of a loss, of one weight."""


def engine_of(case: str, folder: str, model: nn.Module | None = None) -> shoal.Engine:
    tier = {"device": case[2:], **({"nvme_path": folder} if "nvme" in case else {})}
    tiers = {"offload_param": tier, "offload_optimizer": tier} if case[1:] else {}
    return shoal.initialize(model=model or Model(), config={
        "train_micro_batch_size_per_gpu": 2, "timeout": 20, "gradient_clipping": 0.0, "log_level": "error",
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": int(case[0]), **tiers}})[0]


class Plain:
    """The reference: one process, with the engine's calls."""

    def __init__(self, model: nn.Module):
        self.module = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def weights(engine: Any) -> list[Tensor]:
    with shoal.gathered(engine.module):
        return [parameter.detach().clone() for parameter in engine.module.parameters()]


def entry(turn: int) -> Tensor:
    return (torch.arange(12.).view(2, 6) * (turn + 1) % 7 / 7).requires_grad_()


def compare(case: str, folder: str, program: Callable[[Any, int], list[Tensor]],
            prepare: Callable[[nn.Module], None] = lambda model: None) -> None:
    """Run three turns of `program` on an engine and in plain PyTorch: what it returns, and the weights, are equal."""
    models = Model(), Model()
    for model in models:
        prepare(model)
    engine, plain = engine_of(case, folder, models[0]), Plain(models[1])
    for turn in range(3):
        found, wanted = program(engine, turn), program(plain, turn)
        for ours, theirs in zip([*found, *weights(engine)], [*wanted, *weights(plain)], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    engine.destroy()


def regularised(trained: Any, turn: int) -> list[Tensor]:
    """Add terms of weights to the loss, before the forward and after it."""
    x = entry(turn)
    for name, term in TERMS.items():
        loss = trained(x).square().mean()
        with shoal.gathered(trained.module):
            loss = loss + sum(0.01 * term(weight) for weight in (trained.module.blocks[1][0].weight,
                                                                 trained.module.first.weight))
        trained.backward(loss)
        trained.step()
        with shoal.gathered(trained.module.blocks[1]):
            loss = 0.01 * TERMS[name](trained.module.blocks[1][0].weight)
        trained.backward(loss)
        trained.step()
    return [] if x.grad is None else [x.grad]


def called_directly(trained: Any, turn: int) -> list[Tensor]:
    """Call submodules outside the engine's forward: blocks, their parts, and modules of the root; some are recomputed."""
    model, x = trained.module, entry(turn)
    inner = checkpoint(lambda value: model.blocks[1](value).tanh(), model.first(x), use_reentrant=False)
    hidden = model.norm(model.blocks[2][0](inner))
    with torch.no_grad():
        seen = model.norm(model.blocks[0](hidden))
    trained.backward(hidden[:, :3].square().sum() + seen.sum())
    if turn == 1:
        trained.backward(trained(x).sum())
    trained.step()
    assert x.grad is not None
    return [seen, x.grad]


def penalised(trained: Any, turn: int) -> list[Tensor]:
    x = entry(turn)
    out = trained(x)
    slope, = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    trained.backward(out.square().mean() + (slope.norm(dim=1) - 1).square().mean())
    trained.step()
    return [slope.detach()]


def graded(trained: Any, turn: int) -> list[Tensor]:
    """Ask for gradients of parameters, and penalise their norm."""
    out = trained(entry(turn))
    found = torch.autograd.grad(out.square().sum(), [*trained.module.parameters()], retain_graph=True)
    again = torch.autograd.grad(out.square().sum(), [*trained.module.parameters()], create_graph=True)
    trained.backward(out.square().mean() + 0.01 * sum(each.square().sum() for each in again))
    trained.step()
    return [each.detach().clone() for each in found]


def partial(trained: Any, turn: int) -> list[Tensor]:
    """Accumulate into some of the parameters alone."""
    model = trained.module
    inputs = [*model.blocks.parameters(), model.scale] if turn % 2 else [*model.parameters()][-1]
    trained(entry(turn)).square().mean().backward(inputs=inputs)
    trained.step()
    return []


def repeated(trained: Any, turn: int) -> list[Tensor]:
    loss = trained(entry(turn)).square().mean()
    trained.backward(loss, retain_graph=True)
    trained.backward(loss)
    trained.step()
    return []


class Slope(Model):
    """The derivative of a model by its input, as forces are of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            slope, = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return slope.mean() * self.scale


def derived(case: str, folder: str) -> None:
    engine, plain = engine_of(case, folder, Slope()), Plain(Slope())
    for turn in range(3):
        for trained in (engine, plain):
            trained.backward(trained(entry(turn)).square().mean())
            trained.step()
        with torch.no_grad():
            torch.testing.assert_close(engine(entry(9)), plain(entry(9)))
        torch.testing.assert_close(weights(engine), weights(plain), rtol=1e-4, atol=1e-6)
    engine.destroy()


def hooked(case: str, folder: str) -> None:
    """Hooks of parameters see and change the same gradients, whenever they were registered."""
    seen: dict[nn.Module, list[Tensor]] = {}

    def register(model: nn.Module) -> None:
        log = seen.setdefault(model, [])
        for weight in (model.first.weight, model.blocks[1][0].weight):
            weight.register_hook(lambda gradient: log.append(gradient.clone()) or gradient * 2)
            weight.register_post_accumulate_grad_hook(lambda parameter: log.append(parameter.grad.clone()))

    models = Model(), Model()
    for model in models:
        register(model)
    engine, plain = engine_of(case, folder, models[0]), Plain(models[1])
    for model in models:
        register(model)
    for turn in range(2):
        for trained in (engine, plain):
            trained.backward(trained(entry(turn)).square().mean())
            trained.step()
    ours, theirs = (seen[model] for model in models)
    assert len(ours) == 2 * 2 * 4
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(weights(engine), weights(plain))
    engine.destroy()


def hooked_alone(case: str, folder: str) -> None:
    """A hook registered since the last pass sees the gradient that begins a pass: that of a loss of one weight."""
    models = Model(), Model()
    engine, plain = engine_of(case, folder, models[0]), Plain(models[1])
    seen: list[list[Tensor]] = []
    for trained, model in ((engine, models[0]), (plain, models[1])):
        log: list[Tensor] = []
        model.first.weight.register_post_accumulate_grad_hook(
            lambda parameter, log=log: log.append(parameter.grad.clone()))  # pyright: ignore[reportUnknownMemberType]
        with shoal.gathered(model.first):
            loss = model.first.weight.square().sum()
        trained.backward(loss)
        trained.step()
        seen.append(log)
    assert len(seen[0]) == 1
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(weights(engine), weights(plain))
    engine.destroy()


def begun_directly(trained: Any, turn: int) -> list[Tensor]:
    """Call a module of the root first after a step, so that a read of its weight waits for the step."""
    trained.backward(trained(entry(turn)).square().mean())
    trained.step()
    out = trained.module.first(entry(turn))
    trained.backward(out.square().mean() + trained(entry(turn)).square().mean())
    trained.step()
    return [out.detach()]


def transformed(case: str, folder: str) -> None:
    """torch.func differentiates a model whose weights stay; where they come and go, a copy of it, as the error says."""
    def per_sample(model: nn.Module, x: Tensor) -> list[Tensor]:
        def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, values, (x[None],)).square().mean()

        values = {name: each.detach() for name, each in model.named_parameters()}
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, x)
        return [found[name] for name, _ in model.named_parameters()]

    engine, plain = engine_of(case, folder), Plain(Model())
    x = entry(0).detach()
    comes_and_goes = case[0] == "3" or "nvme" in case
    for turn in range(2):
        if comes_and_goes:
            with pytest.raises(UsageError, match="Differentiate a copy"):
                per_sample(engine.module, x)
        with shoal.gathered(engine.module):
            model = copy.deepcopy(engine.module)
        found = per_sample(model if comes_and_goes else engine.module, x)
        torch.testing.assert_close(found, per_sample(plain.module, x))
        for trained in (engine, plain):
            trained.backward(trained(entry(turn)).square().mean())
            trained.step()
        torch.testing.assert_close(weights(engine), weights(plain))
    engine.destroy()


PROGRAMS = (regularised, called_directly, begun_directly, penalised, graded, partial, repeated)


def alike(folder: str) -> None:
    for case in CASES[dist.get_world_size()]:
        for program in PROGRAMS:
            compare(case, folder, program)
        derived(case, folder)
        hooked(case, folder)
        hooked_alone(case, folder)
        transformed(case, folder)


@pytest.mark.parametrize("ranks", CASES)
def test_idioms_of_gradients_train_as_plain_pytorch_does(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, alike, str(tmp_path))


def unreadable(model: nn.Module) -> list[str]:
    """Return the parameters that raise the error that says how to read them."""
    found = []
    for name, parameter in model.named_parameters():
        try:
            parameter.sum()
        except ReleasedError as error:
            assert f"parameter '{name}'" in str(error) and "shoal.gathered(" in str(error)
            found.append(name)
    return found


def reads() -> None:
    """Outside of passes no weight can be read, whatever is in memory for the next one."""
    engine = engine_of("3", "")
    every = [name for name, _ in engine.module.named_parameters()]
    for turn in range(3):
        assert unreadable(engine.module) == every
        loss = engine(entry(turn)).sum() + engine.module.norm(engine.module.blocks[0](torch.ones(1, WIDTH))).sum()
        assert unreadable(engine.module) == every, "between forward and backward"
        engine.backward(loss)
        assert unreadable(engine.module) == every, "between backward and step"
        engine.step()
        assert unreadable(engine.module) == every, "right after a step"
        with torch.no_grad(), pytest.raises(RuntimeError):
            engine(torch.ones(1, 1))
        with shoal.gathered(engine.module):
            assert unreadable(engine.module) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_read_outside_of_passes_raises_at_any_time(ranks: int) -> None:
    run_ranks(ranks, reads)


def kept_views() -> None:
    """Views that outlive a pass or a context keep the memory, and read as they did."""
    engine = engine_of("3", "")
    views: list[Tensor] = []
    engine.module.blocks[1].register_forward_pre_hook(lambda module, args: views.append(module[0].weight.t()[1:]))
    engine.backward(engine(entry(0)).sum())
    with shoal.gathered(engine.module):
        views.append(engine.module.blocks[1][0].weight.t()[1:])
    assert torch.equal(views[0], views[1])
    engine.backward(views[0].square().sum() + views[1].square().sum())
    engine.step()


def test_a_view_that_outlives_a_pass_can_be_read() -> None:
    run_ranks(2, kept_views)
