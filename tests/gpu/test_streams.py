"""What comes into memory of a GPU is what was written last, however late the GPU wrote it."""

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


def busy(matrix: Tensor) -> None:
    """Give the GPU work for some milliseconds, so that what follows is late."""
    for _ in range(8):
        matrix = matrix @ matrix


@pytest.mark.parametrize("store", ["device", "host"])
def test_a_buffer_grows_with_what_was_written_last(store: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rests = Memory(device=device) if store == "device" else Memory(device=HOST, pinned=True)
    buffer, matrix = elastic(SIZE, torch.float32, PART, device, rests, "weights"), torch.randn(4096, 4096, device=device)
    found: list[Tensor] = []
    for number in range(ROUNDS):
        busy(matrix)
        buffer.shard.tensor.fill_(number)  # as a step does
        buffer.load_shard()
        found.append((buffer.full[PART.start:PART.stop] == number).all())
        buffer.shrink()
        busy(matrix)
        if store == "device":
            buffer.shard.tensor.fill_(number + 0.5)
        buffer.grow().wait()
        wanted = number + 0.5 if store == "device" else number
        found.append((buffer.full[PART.start:PART.stop] == wanted).all())
        buffer.full.fill_(-1)
        torch.cuda.synchronize()  # the host writes into what the last copy read
    assert torch.stack(found).all()


def test_who_waits_for_a_mark_sees_what_was_copied() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source, target = torch.ones(SIZE, device=device), torch.zeros(SIZE, pin_memory=True)
    stream = h2d_stream(device)
    busy(torch.randn(4096, 4096, device=device))
    with stream.use(after_compute=True):
        target.copy_(source, non_blocking=True)
    stream.record_event().synchronize()
    assert target.sum().item() == SIZE
    stream.keep_for_compute(target)
    stream.keep_for_compute(source)


def placed() -> str:
    process_group.init_distributed()
    return str(process_group.device())


def test_ranks_of_gloo_train_on_the_cpu() -> None:
    assert run_ranks(2, placed) == ["cpu", "cpu"]
