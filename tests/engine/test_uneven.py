"""Ranks with different numbers of batches, and modules that some ranks alone call, train, or say at once why they cannot."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import shoal
from shoal.engine.engine import Engine
from shoal.errors import PeerFailed, RanksDisagree, UsageError
from shoal.testing import run_ranks
from shoal.transport import failure_board

from ..zero.models import WIDTH, WORDS, Block, batch, loss_of
from .trained import model, same, weights

LR = 0.25


def initialized(net: nn.Module, stage: int, **extra: Any) -> Engine:
    config = {"train_micro_batch_size_per_gpu": 2, "timeout": 60, "gradient_clipping": 0.0,
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **extra}
    return shoal.initialize(model=net, optimizer=SGD(net.parameters(), lr=LR), config=config)[0]


def plain(counts: list[int]) -> dict[str, Tensor]:
    """Train with the mean over all ranks of the gradients of those that have a batch."""
    net = model()
    optimizer = SGD(net.parameters(), lr=LR)
    for step in range(max(counts)):
        for rank in (rank for rank, count in enumerate(counts) if step < count):
            tokens, targets = batch(step, 0, rank)
            (loss_of(net(tokens), targets) / len(counts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.named_parameters())


def joined(counts: list[int], stage: int, by_engine: bool) -> None:
    engine = initialized(model(), stage)
    with engine.join():
        for step in range(counts[engine.global_rank]):
            tokens, targets = batch(step, 0, engine.global_rank)
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss) if by_engine else loss.backward()
            engine.step()
    assert engine.global_steps == max(counts)
    assert same(weights(engine), plain(counts))
    before = weights(engine)
    seen = []
    with engine.join(), torch.no_grad():
        for step in range(counts[engine.global_rank]):
            seen.append(engine(batch(step, 0, 0)[0]).sum().item())
    assert len(seen) == counts[engine.global_rank] and same(before, weights(engine))
    engine.destroy()


def all_joined(cases: list[tuple[list[int], int, bool]]) -> None:
    for case in cases:
        joined(*case)


def test_ranks_of_different_numbers_of_batches_train_to_the_end() -> None:
    run_ranks(2, all_joined, [([1, 3], 0, True), ([3, 1], 1, False), ([2, 0], 2, True), ([1, 3], 3, True),
                              ([0, 2], 3, False)])


class Counted(nn.Module):
    """A model with a buffer that each forward in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.norm(self.layer(x)).square().mean()}


def accumulated() -> tuple[int, int, float]:
    """Accumulate over two microbatches, of which rank 1 has three less."""
    engine = initialized(Counted(), 2, gradient_accumulation_steps=2)
    with engine.join():
        for number in range(4 if engine.global_rank == 0 else 1):
            with engine.no_sync() if number % 2 == 0 else engine.trace():
                engine.backward(engine(torch.randn(3, 4))["loss"])
            engine.step()
    weight = weights(engine)["layer.weight"].sum().item()
    return engine.global_steps, int(engine.module.norm.num_batches_tracked), weight


def test_a_rank_that_has_ended_follows_accumulation_and_keeps_buffers() -> None:
    (steps, forwards, weight), (steps_of_other, own_forwards, weight_of_other) = run_ranks(2, accumulated)
    assert steps == steps_of_other == 2 and weight == weight_of_other
    assert forwards == 4 and own_forwards <= 4


def nested() -> None:
    engine = initialized(model(), 1)
    with engine.join(), pytest.raises(UsageError, match="join: nested in another join of this engine"), engine.join():
        pass
    different = "join: ranks make different calls: rank 0 forward, rank 1 step; let every rank with data"
    with pytest.raises(RanksDisagree, match=different), engine.join():
        engine(batch(0, 0, 0)[0]) if engine.global_rank == 0 else engine.step()


def test_a_join_in_a_join_and_ranks_in_different_calls_are_refused() -> None:
    run_ranks(2, nested)


def failing() -> str:
    engine = initialized(model(), 3)
    with pytest.raises(ValueError if dist.get_rank() == 0 else PeerFailed) as caught, engine.join():
        if engine.global_rank == 0:
            raise ValueError("no such file")
        engine(batch(0, 0, 0)[0])
    return str(caught.value)


def test_an_error_within_a_join_ends_it_on_every_rank() -> None:
    assert run_ranks(2, failing)[1] == "rank 0 left engine.join() by ValueError: no such file"


def without_join(stage: int) -> str:
    """Rank 0 has one batch and saves; rank 1 has two."""
    engine = initialized(model(), stage)
    with pytest.raises(PeerFailed) as caught:
        for step in range(1 + engine.global_rank):
            tokens, targets = batch(step, 0, engine.global_rank)
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
        engine.save_checkpoint("nowhere")
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_data_that_ends_sooner_on_one_rank_is_named_with_the_fix(stage: int) -> None:
    first, second = run_ranks(2, without_join, stage)
    assert first == second
    assert "rank 0 for a comparison between ranks (save_checkpoint after 1 steps)" in first
    assert f"rank 1 for {'gather' if stage == 3 else 'reduce'} of unit '" in first and "ward after 1 steps)" in first
    assert "put the loop within `with engine.join():`" in first


class Experts(nn.Module):
    """Each rank calls the expert of its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.experts[chosen](x)


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixture, self.head = nn.Embedding(WORDS, WIDTH), Experts(), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, chosen: int) -> Tensor:
        return self.head(self.mixture(self.embed(tokens), chosen))


def choosing() -> Chooses:
    torch.manual_seed(1)
    return Chooses()


def experts(leaf: bool) -> str:
    net = choosing()
    if leaf:
        assert shoal.zero.set_leaf_modules(net, [Experts]) == shoal.zero.get_leaf_modules(net) == [net.mixture]
    engine = initialized(net, 3)
    reference = choosing()
    optimizer = SGD(reference.parameters(), lr=LR)
    try:
        for step in range(3):
            tokens, targets = batch(step, 0, engine.global_rank)
            engine.backward(loss_of(engine(tokens, engine.global_rank), targets))
            engine.step()
            for rank in range(2):
                tokens, targets = batch(step, 0, rank)
                (loss_of(reference(tokens, rank), targets) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    except PeerFailed as error:
        return str(error)
    assert same(weights(engine), dict(reference.named_parameters()))
    return ""


def test_experts_that_ranks_choose_train_within_a_leaf_module() -> None:
    assert run_ranks(2, experts, True) == ["", ""]


def test_experts_that_ranks_choose_are_named_with_the_fix() -> None:
    for message in run_ranks(2, experts, False):
        call = "(forward after 0 steps)"
        assert message.startswith(f"ranks wait for each other: rank 0 for gather of unit 'mixture.experts.0' {call}, "
                                  f"rank 1 for gather of unit 'mixture.experts.1' {call}.")
        assert "shoal.zero.set_leaf_modules(model, [module]) before initialize" in message


def test_a_leaf_that_matches_no_module_is_refused() -> None:
    net = choosing()
    assert shoal.zero.set_leaf_modules(net, ["mixture"]) == [net.mixture]
    assert shoal.zero.set_leaf_modules(net, [net.mixture], is_leaf=False) and shoal.zero.get_leaf_modules(net) == []
    with pytest.raises(UsageError, match="set_leaf_modules: got mixed, which matches no module of Chooses; give modules"):
        shoal.zero.set_leaf_modules(net, ["mixed"])


def slow() -> list[str]:
    """Rank 0 stays outside of every call until rank 1 has warned."""
    engine = initialized(model(), 3)
    store = dist.distributed_c10d._get_default_store()
    messages: list[str] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            store.set("warned", "yes")

    logging.getLogger("shoal").addHandler(Notes())
    if engine.global_rank == 0:
        store.wait(["warned"])
    else:
        failure_board._WARN_AFTER = 0.1
    engine(batch(0, 0, 0)[0])
    return messages


def test_a_long_wait_for_a_rank_outside_of_shoal_is_warned_of() -> None:
    none, [warning] = run_ranks(2, slow)
    assert none == []
    assert warning.startswith("rank 1 has waited ")
    assert "s for gather of unit 'root' (forward after 0 steps), which rank 0 did not begin, or could not say so" in warning
    assert "is slow, has ended, or is cut off" in warning
    assert "`with engine.join():`" in warning
