"""A block that recomputes gives the gradients of plain PyTorch whatever a script does around it, or refuses by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.attention import Blocks, attend
from shoal.attention.call import AttentionCall
from shoal.errors import UsageError
from shoal.testing import run_ranks

WIDTH, BLOCKS = 8, 3
SECTIONS: list[dict[str, Any]] = [{"recompute": "full"}, {"recompute": "selective"}]


class Block(nn.Module):
    """A residual MLP that a subclass may disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x) * self.scale))


class Differentiates(Block):
    """Takes a gradient in its forward, as models of forces do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            force, = torch.autograd.grad(self.down(F.gelu(self.up(z))).sum(), z)
        return super().forward(x + force)


class Interrupted(Block):
    """Raises an interrupt once."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Interrupted.calls += 1
        y = F.gelu(self.up(x))
        if Interrupted.calls == BLOCKS:
            raise KeyboardInterrupt
        return x + self.down(y)


def _engine(model: nn.Module, section: dict[str, Any], stage: int) -> Any:
    return shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "zero_optimization": {"stage": stage}, **({"activation_checkpointing": section} if section else {})})[0]


def _model(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[kind() for _ in range(BLOCKS)])


def _losses(section: dict[str, Any], stage: int, kind: type[nn.Module], hook: str = "") -> list[float]:
    model = _model(kind)
    for block in model:
        if hook == "before":
            block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        if hook == "after":
            block.register_forward_hook(lambda module, args, output: output.sin() * output)
        if hook == "around":
            block.register_forward_pre_hook(lambda module, args: setattr(module, "scale", 3.0))
            block.register_forward_hook(lambda module, args, output: setattr(module, "scale", 1.0), always_call=True)
    engine = _engine(model, section, stage)
    losses: list[float] = []
    for _ in range(3):
        loss = engine(torch.ones(4, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("section", SECTIONS, ids=str)
@pytest.mark.parametrize("hook", ["before", "after", "around"])
def test_a_recompute_sees_what_hooks_of_a_script_did_in_forward(hook: str, section: dict[str, Any], stage: int) -> None:
    assert run_ranks(1, _losses, section, stage, Block, hook) == run_ranks(1, _losses, {}, stage, Block, hook)


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_a_block_may_differentiate_in_its_forward(section: dict[str, Any]) -> None:
    assert run_ranks(1, _losses, section, 0, Differentiates) == run_ranks(1, _losses, {}, 0, Differentiates)


class Overwrites(Block):
    """Writes to a tensor after autograd saved it, which plain PyTorch refuses in backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).sigmoid()
        product = hidden * hidden.sin()
        hidden.zero_()
        return super().forward(x) + self.down(product)


class OverwritesStatistics(Block):
    """Writes to a tensor that autograd saved for a value of which nobody wants the gradient, as plain PyTorch allows."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        self.size = hidden.norm()
        return x + self.down(hidden.relu_())


def _overwritten(section: dict[str, Any], stage: int) -> None:
    with pytest.raises(UsageError if section or stage else RuntimeError, match=r"in ?place"):
        _losses(section, stage, Overwrites)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("section", [{}, *SECTIONS], ids=str)
def test_a_block_that_overwrites_what_autograd_saved_is_refused(section: dict[str, Any], stage: int) -> None:
    run_ranks(1, _overwritten, section, stage)


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_a_saved_tensor_that_no_backward_needs_may_be_written_to(section: dict[str, Any]) -> None:
    assert run_ranks(1, _losses, section, 0, OverwritesStatistics) == run_ranks(1, _losses, {}, 0, OverwritesStatistics)


class Masked(nn.Module):
    """Blocks that get one mask, by name or in a list, which is written to after each."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, masks: Any) -> Tensor:
            mask = masks if isinstance(masks, Tensor) else masks[0]
            return x + F.gelu(self.up(x)) * mask.float()

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(BLOCKS))
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(1, dtype=torch.long)
        for block in self.blocks:
            x = block(x, [mask]) if self.wrapped else block(x, masks=mask)
            mask.add_(1)
        return x


def _written_mask(section: dict[str, Any], wrapped: bool) -> None:
    engine = _engine(Masked(wrapped), section, 0)
    with pytest.raises(UsageError, match=r"argument 'masks' of a Block, of shape \(1,\), was written to in place"):
        engine.backward(engine(torch.ones(4, WIDTH)).square().mean())


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_a_held_argument_that_is_written_to_is_refused(section: dict[str, Any], wrapped: bool) -> None:
    run_ranks(1, _written_mask, section, wrapped)


def _after_an_interrupt(section: dict[str, Any], stage: int) -> list[float]:
    """Interrupt a forward, differentiate something else, and train on."""
    model = _model(Interrupted)
    engine = _engine(model, section, stage)
    Interrupted.calls = 0 if section else BLOCKS
    if section:
        with pytest.raises(KeyboardInterrupt):
            engine(torch.ones(4, WIDTH))
    other = nn.Linear(3, 3)
    other(torch.randn(3, 3)).square().sum().backward()
    loss = engine(torch.ones(4, WIDTH)).square().mean()
    engine.backward(loss)
    engine.step()
    return [loss.item(), engine(torch.ones(4, WIDTH)).square().mean().item()]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("section", [*SECTIONS, {"budget": "1MB"}], ids=str)
def test_an_interrupt_in_a_block_leaves_no_hooks_behind(section: dict[str, Any], stage: int) -> None:
    assert run_ranks(1, _after_an_interrupt, section, stage) == run_ranks(1, _after_an_interrupt, {}, stage)


def _compiled(how: str, section: dict[str, Any]) -> list[float]:
    model: Any = _model(Block)
    ways: dict[str, Callable[[Any], object]] = {
        "blocks": lambda model: [block.compile(backend="aot_eager") for block in model],
        "model": lambda model: model.compile(backend="aot_eager")}
    if how in ways:
        ways[how](model)
    engine = _engine(model, section, 0)
    if how == "engine":
        engine.compile(backend="aot_eager")
    try:
        loss = engine(torch.ones(4, WIDTH)).square().mean()
    except UsageError as error:
        assert how == "model" and "a Block recomputes its activations within a larger graph" in str(error)
        return []
    engine.backward(loss)
    engine.step()
    return [engine(torch.ones(4, WIDTH)).square().mean().item()]


@pytest.mark.host("the late device knows no torch.compile")
@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_compiled_blocks_recompute_and_a_larger_graph_is_refused(section: dict[str, Any]) -> None:
    plain, = run_ranks(1, _compiled, "", {})
    for how in ("blocks", "engine"):
        assert run_ranks(1, _compiled, how, section)[0] == pytest.approx(plain, rel=1e-6)
    # Older torch ends its graph at the refusal, and compiles parts of each block: no graph is larger than a block then.
    found, = run_ranks(1, _compiled, "model", section)
    assert found == ([] if torch.__version__ >= "2.13" else pytest.approx(plain, rel=1e-6))


class Attends(Block):
    """A block whose attention is block-sparse and drops probabilities."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(1, 2, -1, WIDTH)
        found = attend(heads, heads, heads, LAYOUT, dropout=0.3, backend="gather")
        return x + self.down(found.reshape(*x.shape[:-1], -1))


LAYOUT = Blocks.of(torch.eye(4, dtype=torch.bool)[None], 16)


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_recompute_keeps_what_an_attention_kernel_returned(
        recompute: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[AttentionCall] = []
    module = sys.modules["shoal.attention.attend"]
    kernels = module._TABLE["gather"]

    def forward(call: AttentionCall, *operands: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(call)
        return kernels.forward(call, *operands)

    monkeypatch.setattr(module, "_TABLE", {"gather": kernels._replace(forward=forward)})
    results: list[list[Tensor]] = []
    for each in ("none", recompute):
        calls.clear()
        model = _model(Attends)
        engine = _engine(model, {"recompute": each}, 0)
        torch.manual_seed(3)
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 64, WIDTH)).square().mean())
            engine.step()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert len(calls) == 2 * BLOCKS * times
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
