"""Ranks of one machine read each other's memory: the same bits as by sockets, and errors instead of endless waits."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.errors import CollectiveFailed, CollectiveTimeout
from shoal.testing import run_ranks
from shoal.transport import peer_memory
from shoal.transport.collectives import Communicator, Label, traffic

GATHER = Label(kind="gather", unit="blocks.0", index=0)
REDUCE = Label(kind="reduce", unit="blocks.0", index=0)
SPAN = 1000


def communicator(direct_bytes: int | None = 1, timeout: float = 60) -> Communicator:
    assert dist.group.WORLD is not None
    return Communicator(dist.group.WORLD, timeout=timeout, direct_bytes=direct_bytes)


def gathered(ranks: Communicator) -> Tensor:
    full = torch.zeros(SPAN * ranks.ranks)
    full[SPAN * ranks.rank:SPAN * (ranks.rank + 1)] = torch.arange(SPAN) + ranks.rank
    ranks.all_gather(full, GATHER).wait()
    return full


def reduced(ranks: Communicator, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(ranks.rank)
    source = torch.randn(SPAN * ranks.ranks).to(dtype)
    target = torch.ones(SPAN, dtype=dtype)
    staging = torch.empty(ranks.staging_elements(source.numel()), dtype=dtype)
    ranks.reduce_scatter(source, target, staging, REDUCE, scale=0.5, accumulate=True).wait()
    return target


def both_ways() -> tuple[bool, int, int]:
    direct, sockets = communicator(1), communicator(None)
    before = traffic.bytes_sent
    found = [gathered(direct), *(reduced(direct, dtype) for dtype in (torch.float32, torch.bfloat16))]
    lent, sent = traffic.peer_memory_bytes, traffic.bytes_sent - before
    wanted = [gathered(sockets), *(reduced(sockets, dtype) for dtype in (torch.float32, torch.bfloat16))]
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), lent, sent


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_memory_gives_the_same_bits_and_byte_counts_as_sockets(ranks: int) -> None:
    for same, lent, sent in run_ranks(ranks, both_ways):
        assert same
        assert lent == sent == (4 + 4 + 2) * SPAN * (ranks - 1)


def interrupted() -> Tensor:
    ranks, store = communicator(), dist.distributed_c10d._get_default_store()
    if ranks.rank == 1:
        store.get("interrupted")
        return gathered(ranks)
    full, wait = torch.zeros(SPAN * 2), peer_memory.PeerTransfer.wait
    full[:SPAN] = torch.arange(SPAN)
    handle = ranks.all_gather(full, GATHER)

    def interrupt(self: object, timeout: float) -> None:
        raise KeyboardInterrupt

    peer_memory.PeerTransfer.wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    peer_memory.PeerTransfer.wait = wait
    store.set("interrupted", "")
    handle.wait()
    return full


def test_a_wait_after_an_interrupted_one_is_for_what_is_left() -> None:
    first, second = run_ranks(2, interrupted)
    assert torch.equal(first, second)


def lent_by_size() -> tuple[int, int]:
    ranks = communicator(4 * SPAN)
    gathered(ranks)
    large = traffic.peer_memory_bytes
    reduced(ranks, torch.bfloat16)
    return large, traffic.peer_memory_bytes


def test_small_messages_go_by_socket() -> None:
    assert run_ranks(2, lent_by_size)[0] == (4 * SPAN, 4 * SPAN)


def trained(direct_bytes: int | None, stage: int) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
              "zero_optimization": {"stage": stage}, "direct_bytes": direct_bytes, "timeout": 20}
    engine, *_ = shoal.initialize(model=model, config=config)
    before = traffic.peer_memory_bytes
    for step in range(5):
        torch.manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(2, 32)).pow(2).mean())
        engine.step()
    with shoal.gathered(model):
        return [parameter.detach().clone() for parameter in model.parameters()], traffic.peer_memory_bytes - before


def trained_both_ways(stage: int) -> tuple[bool, int, int]:
    (direct, lent), (sockets, none) = trained(1, stage), trained(None, stage)
    return all(torch.equal(a, b) for a, b in zip(direct, sockets, strict=True)), lent, none


@pytest.mark.parametrize("stage", range(4))
def test_training_gives_the_same_weights_either_way(stage: int) -> None:
    for same, lent, none in run_ranks(3, trained_both_ways, stage):
        assert same
        assert lent > 0
        assert none == 0


def forbidden() -> tuple[bool, int]:
    if dist.get_rank() == 1:
        def refuse(*_: int) -> None:
            raise PermissionError(1, "Operation not permitted")
        peer_memory.read_memory = refuse
    ranks = communicator()
    return bool(gathered(ranks)[-1] == SPAN + ranks.ranks - 2), traffic.peer_memory_bytes


def elsewhere() -> tuple[bool, int]:
    if dist.get_rank() == 1:
        link = os.readlink
        os.readlink = lambda path: "net:[1]" if str(path).endswith("ns/net") else link(path)
    ranks = communicator()
    return bool(gathered(ranks)[-1] == SPAN + ranks.ranks - 2), traffic.peer_memory_bytes


@pytest.mark.parametrize("obstacle", [forbidden, elsewhere])
def test_ranks_that_may_not_read_each_other_use_sockets(obstacle: object) -> None:
    first, second, third = run_ranks(3, obstacle)
    assert first == third == (True, 4 * SPAN)
    assert second == (True, 0)


def alone(leave: bool) -> str:
    ranks = communicator()
    gathered(ranks)
    if not leave:  # shorten it once the ranks have met: only the wait that is to time out may run into it
        ranks.shorten_timeout(timedelta(seconds=0.5))
    if ranks.rank == 0:
        with pytest.raises((CollectiveFailed, CollectiveTimeout)) as caught:
            gathered(ranks)
        dist.barrier()
        return f"{type(caught.value).__name__}: {caught.value}"
    if leave:
        assert ranks._peer_memory is not None  # pyright: ignore[reportPrivateUsage]
        ranks._peer_memory.close()  # pyright: ignore[reportPrivateUsage]
    dist.barrier()
    return ""


def test_a_peer_that_offers_nothing_is_named_after_the_timeout() -> None:
    said = run_ranks(2, alone, False)[0]
    assert said.startswith("CollectiveTimeout: rank 0 of 2, step 0: gather of unit 'blocks.0' did not finish within 0.5 s")
    assert "not offered by rank 1" in said


def late() -> tuple[bool, str]:
    """Rank 1 offers after rank 0 has timed out: the buffer that rank 0 has reused since stays unchanged."""
    ranks = communicator()
    gathered(ranks)
    full = torch.zeros(2 * SPAN)
    said = ""
    if ranks.rank == 0:
        ranks.shorten_timeout(timedelta(seconds=0.5))
        with pytest.raises(CollectiveTimeout):
            ranks.all_gather(full, GATHER).wait()
        full.fill_(7)
    dist.barrier()
    if ranks.rank == 1:
        with pytest.raises((CollectiveFailed, CollectiveTimeout)) as caught:
            ranks.all_gather(torch.ones(2 * SPAN), GATHER).wait()
        said = str(caught.value)
    dist.barrier()
    return bool((full == 7).all()), said


def test_an_offer_after_the_timeout_is_refused() -> None:
    (kept, _), (_, said) = run_ranks(2, late)
    assert kept
    assert "could not read this rank's memory" in said


def test_a_lost_peer_is_reported_at_once() -> None:
    said = run_ranks(2, alone, True)[0]
    assert said.startswith("CollectiveFailed: rank 0 of 2, step 0: gather of unit 'blocks.0' broke")
    assert "rank 1 of the group closed its connection" in said


def unequal() -> str:
    ranks = communicator()
    size = 2 * (SPAN if ranks.rank == 0 else SPAN - 1)
    with pytest.raises((CollectiveFailed, CollectiveTimeout)) as caught:
        ranks.all_gather(torch.zeros(size), GATHER).wait()
    return str(caught.value)


def test_messages_of_different_sizes_are_refused() -> None:
    said = run_ranks(2, unequal)  # each rank may hear of the other's refusal before its own
    found = [f"{offered} bytes were offered where {expected} are expected" in text for text in said
             for offered, expected in ((4 * SPAN - 4, 4 * SPAN), (4 * SPAN, 4 * SPAN - 4))]
    assert any(found), said


def ahead() -> list[float]:
    """Offer under several tags before the peer has a destination for any, and wait in another order."""
    ranks = communicator()
    labels = [Label(kind="gather", unit=str(index), index=index) for index in range(5)]
    buffers = [torch.full((2 * SPAN,), float(10 * index + ranks.rank)) for index in range(5)]
    order = range(5) if ranks.rank == 0 else range(4, -1, -1)
    if ranks.rank == 1:
        torch.ones(2000, 2000) @ torch.ones(2000, 2000)
    handles = {index: ranks.all_gather(buffers[index], labels[index]) for index in order}
    for index in sorted(handles, key=lambda index: (index % 2, index)):
        handles[index].wait()
    return [buffer[SPAN * (1 - ranks.rank)].item() for buffer in buffers]


def test_offers_and_destinations_match_by_tag_in_any_order() -> None:
    assert run_ranks(2, ahead) == [[1, 11, 21, 31, 41], [0, 10, 20, 30, 40]]
