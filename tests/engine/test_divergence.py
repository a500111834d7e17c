"""Ranks that diverge raise: at `initialize` for what they built, as soon as they wait for each other for what they call."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.engine.engine import Engine
from shoal.errors import CollectiveTimeout, PeerFailed, RanksDisagree
from shoal.testing import run_ranks

from ..zero.models import Plain, batch
from .trained import build, configured, loss


class Branching(Plain):
    """Rank 1 runs the blocks in another order."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in reversed(self.blocks) if dist.get_rank() else self.blocks:
            x = block(x)
        return self.head(x)


def check(messages: list[str], first: str, second: str) -> None:
    """Check that both ranks name the collectives that each waits for."""
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"ranks wait for each other: rank 0 for {first}, rank 1 for {second}. ")


def time_out_soon(engine: Engine) -> None:
    """Shorten the timeout once the ranks have met: only the wait that is to time out may run into it."""
    for communicator in engine.parameter_groups.communicators:
        communicator.shorten_timeout(timedelta(seconds=1))
    dist.barrier()


def branch(debug: bool) -> str:
    engine = shoal.initialize(model=Branching(), config=configured(3, timeout=60, debug=debug))[0]
    with pytest.raises(RanksDisagree if debug else PeerFailed) as caught:
        loss(engine, 0)
    return str(caught.value)


def test_diverging_ranks_name_rank_unit_and_collective() -> None:
    check(run_ranks(2, branch, False), "gather of unit 'blocks.0' (forward after 0 steps)",
          "gather of unit 'blocks.2' (forward after 0 steps)")


def test_debug_reports_diverging_ranks_at_once() -> None:
    first, second = run_ranks(2, branch, True)
    assert first == second
    assert first.startswith("step 0: ranks issue different collectives: rank 0: gather of unit 'blocks.0' (")
    assert "; rank 1: gather of unit 'blocks.2' (" in first


def early(other: str, debug: bool) -> str:
    """Rank 0 steps, while rank 1 runs another microbatch, or saves."""
    engine = build(3, timeout=60, debug=debug)
    engine.backward(loss(engine, 0))
    with pytest.raises(RanksDisagree if debug else PeerFailed) as caught:
        if dist.get_rank() == 0:
            engine.step()
        elif other == "save":
            engine.save_checkpoint("nowhere")
        loss(engine, 0, 1)
    return str(caught.value)


def test_a_rank_that_steps_alone_names_the_collectives() -> None:
    decision = "the decision at the end of a step (step after 0 steps)"
    check(run_ranks(2, early, "forward", False), decision, "gather of unit 'root' (forward after 0 steps)")
    check(run_ranks(2, early, "save", False), decision, "a comparison between ranks (save_checkpoint after 0 steps)")


def absent() -> str:
    """Rank 1 stays outside of every call until rank 0 has waited for too long."""
    engine = build(3, timeout=60)
    time_out_soon(engine)
    store = dist.distributed_c10d._get_default_store()
    if engine.global_rank:
        store.wait(["timed out"])
        return ""
    with pytest.raises(CollectiveTimeout) as caught:
        loss(engine, 0)
    store.set("timed out", "yes")
    return str(caught.value)


def test_a_rank_that_waits_alone_times_out_naming_the_collective() -> None:
    message, _ = run_ranks(2, absent)
    assert message.startswith("rank 0 of 2, step 0: gather of unit 'root' did not finish within 1 s. Another rank took a "
                              'different path through the model, stopped, or is that slow: set "debug": true')


def test_debug_reports_a_rank_that_steps_alone() -> None:
    for message in run_ranks(2, early, "forward", True):
        assert message.startswith("step 0: ranks issue different collectives: rank 0: the decision at the end of a step (")
        assert "; rank 1: gather of unit 'root' (" in message


class Wider(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up = nn.Linear(12, 24)
        self.blocks[1].down = nn.Linear(24, 12)


class Deeper(Plain):
    def __init__(self) -> None:
        super().__init__(4)


class HeadFrozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.bias.requires_grad_(False)


def differ(other: type[nn.Module], ours: str, theirs: str, groups: bool = False) -> None:
    plain = dist.get_rank() == 0
    model = Plain() if plain else other()
    parameters: Any = [{"params": [p for p in model.parameters() if p.dim() > 1], "lr": 1e-2},
                       {"params": [p for p in model.parameters() if p.dim() < 2]}] if groups and not plain else None
    with pytest.raises(RanksDisagree) as caught:
        shoal.initialize(model=model, model_parameters=parameters, config=configured(2))
    message = str(caught.value)
    assert message.startswith("initialize: ranks built different models. First difference, at parameter ")
    assert f"rank 0 has {ours}; rank 1 has {theirs}. Build the same model on every rank." in message, message


def test_different_models_raise_with_the_first_difference() -> None:
    run_ranks(2, differ, Wider, "blocks.1.up.weight (25, 12) torch.float32 trainable group 0 in unit 'blocks.1'",
              "blocks.1.up.weight (24, 12) torch.float32 trainable group 0 in unit 'blocks.1'")
    run_ranks(2, differ, Deeper, "nothing", "blocks.3.norm.weight (12,) torch.float32 trainable group 0 in unit 'blocks.3'")
    run_ranks(2, differ, HeadFrozen, "head.bias (17,) torch.float32 trainable group 0 in unit 'root'",
              "head.bias (17,) torch.float32 frozen group 0 in unit 'root frozen'")


def test_different_parameter_groups_raise_with_the_first_difference() -> None:
    run_ranks(2, differ, Plain, "head.bias (17,) torch.float32 trainable group 0 in unit 'root'",
              "head.bias (17,) torch.float32 trainable group 1 in unit 'root'", True)


def values() -> tuple[float, float]:
    """Build models from different random numbers on each rank."""
    torch.manual_seed(dist.get_rank())
    engine = shoal.initialize(model=Plain(), config=configured(1))[0]
    tokens, _ = batch(0, 0, 0)
    return engine(tokens).sum().item(), torch.rand(()).item()


def test_all_ranks_train_the_initial_values_of_rank_0() -> None:
    (first, own), (second, other) = run_ranks(2, values)
    assert first == second
    assert own != other
