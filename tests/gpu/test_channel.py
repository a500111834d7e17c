"""A pipeline channel sends tensors of a GPU in compute order; with gloo it stages them on the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal.pipeline.channel import Receiver, Sender
from shoal.testing import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; here is none")]


def send_and_receive(backends: str | None) -> list[float]:
    device, group = torch.device("cuda", 0), dist.group.WORLD
    if backends is not None:
        device, group = torch.device("cuda", dist.get_rank()), dist.new_group(backend=backends)
        torch.cuda.set_device(device)
    assert isinstance(group, dist.ProcessGroup)
    if dist.get_rank() == 0:
        end = Sender(group, 1, 0, device=device, timeout=30, name="activations of stage 1 from stage 0")
        weight = torch.randn(512, 512, device=device)
        sums: list[float] = []
        for _ in range(10):
            value = (weight @ weight @ weight).requires_grad_()
            end.send({"x": value, "length": torch.tensor(3)})
            sums.append(value.double().sum().item())
        end.flush()
        end.close()
        return sums
    end = Receiver(group, 0, 0, device=device, timeout=30, name="activations of stage 1 from stage 0")
    end.expect(10)
    received: list[float] = []
    for _ in range(10):
        value = end.receive()
        assert (value["x"].device, value["x"].requires_grad, value["length"].device.type) == (device, True, "cpu")
        received.append(value["x"].detach().double().sum().item())
    end.close()
    return received


def test_tensors_of_a_gpu_arrive_on_the_gpu_of_the_peer() -> None:
    sent, received = run_ranks(2, send_and_receive, None)
    assert sent == received


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses ranks that share one")
def test_tensors_are_sent_by_nccl_and_metadata_by_gloo() -> None:
    sent, received = run_ranks(2, send_and_receive, "cpu:gloo,cuda:nccl")
    assert sent == received
