"""Copies to a GPU read the values written last, however late the compute stream writes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.testing import run_ranks
from shoal.tier import Memory, elastic
from shoal.tier.streams import h2d_stream
from shoal.transport import process_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; here is none")]

SIZE, PART, ROUNDS = 1 << 22, range(1 << 20, 3 << 20), 20
HOST = torch.device("cpu")


def delay_compute(matrix: Tensor) -> None:
    """Keep the compute stream busy for some milliseconds, so that later work is late."""
    for _ in range(8):
        matrix = matrix @ matrix


@pytest.mark.parametrize("store", ["device", "host"])
def test_a_buffer_grows_with_the_values_written_last(store: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory = Memory(device=device) if store == "device" else Memory(device=HOST, pinned=device)
    buffer, matrix = elastic(SIZE, torch.float32, PART, device, memory, "weights"), torch.randn(4096, 4096, device=device)
    equal: list[Tensor] = []
    for number in range(ROUNDS):
        delay_compute(matrix)
        buffer.shard.tensor.fill_(number)  # like a step
        buffer.load_shard()
        equal.append((buffer.full[PART.start:PART.stop] == number).all())
        buffer.shrink()
        delay_compute(matrix)
        if store == "device":
            buffer.shard.tensor.fill_(number + 0.5)
        buffer.grow().wait()
        if buffer.own is not None:
            buffer.load_shard()
        expected = number + 0.5 if store == "device" else number
        equal.append((buffer.full[PART.start:PART.stop] == expected).all())
        buffer.full.fill_(-1)
        torch.cuda.synchronize()  # before the host overwrites the source of the last copy
    assert torch.stack(equal).all()


def test_synchronizing_an_event_makes_the_copy_visible() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source, target = torch.ones(SIZE, device=device), torch.zeros(SIZE, pin_memory=True)
    stream = h2d_stream(device)
    delay_compute(torch.randn(4096, 4096, device=device))
    with stream.use():
        target.copy_(source, non_blocking=True)
    stream.record_event().synchronize()
    assert target.sum().item() == SIZE
    stream.keep_for_compute(target)
    stream.keep_for_compute(source)


def device_of_rank() -> str:
    process_group.init_distributed()
    return str(process_group.device())


def test_gloo_ranks_train_on_the_cpu() -> None:
    assert run_ranks(2, device_of_rank) == ["cpu", "cpu"]
