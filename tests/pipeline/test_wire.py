"""CPU tensors go by gloo in chunks, device tensors by their own backend; without tags each edge has a group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal.mesh.mesh import Mesh
from shoal.pipeline import links
from shoal.pipeline.links import Connector, Edge, edge_backends
from shoal.pipeline.wire import wire_chunks
from shoal.testing import run_ranks
from shoal.transport.collectives import CHUNK_BYTES

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)
GLOO, NCCL, BOTH = {"cpu": "gloo", "cuda": "gloo"}, {"cuda": "nccl"}, {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(("backends", "device", "found"), [
    (GLOO, HOST, None), (GLOO, GPU, None), (BOTH, HOST, None),
    (NCCL, GPU, "cpu:gloo,cuda:nccl"), (BOTH, GPU, "cpu:gloo,cuda:nccl"),
    ({"cpu": "mpi", "cuda": "mpi"}, HOST, "cpu:gloo"),
])  # fmt: skip
def test_each_edge_has_a_group_where_the_backend_has_no_tags(backends: dict[str, str], device: torch.device,
                                                             found: str | None) -> None:
    assert edge_backends(backends, device) == found


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 4])
def test_gloo_sends_chunks_and_a_device_backend_sends_whole_tensors(size: int) -> None:
    host, device = (wire_chunks(torch.empty(size // 4, device=place)) for place in ("cpu", "meta"))
    assert sum(each.nbytes for each in host) == sum(each.nbytes for each in device) == size // 4 * 4
    assert [each.nbytes <= CHUNK_BYTES for each in host] == [True] * -(-(size // 4 * 4) // CHUNK_BYTES)
    assert len(device) == (size >= 4)


def exchange_over_edge_groups() -> list[float]:
    links.edge_backends = lambda backends, device: "cpu:gloo"
    mesh = Mesh(pipeline=2)
    connected = Connector(mesh, 2, HOST, 20)
    there, back = Edge("activations", 1), Edge("gradients", 0)
    me = dist.get_rank()
    sender = connected.sender((there, back)[me], 1 - me)
    receiver = connected.receiver((back, there)[me], 1 - me)
    assert sender._wire._group is not receiver._wire._group
    assert dist.group.WORLD not in (sender._wire._group, receiver._wire._group)
    receiver.expect(3)
    found: list[float] = []
    for number in range(3):
        sender.send(torch.full((5,), float(10 * me + number)))
        found.append(receiver.receive().sum().item())
    sender.flush()
    connected.end_waits()
    sender.close()
    receiver.close()
    return found


def test_edges_with_a_group_each_deliver_their_values() -> None:
    assert run_ranks(2, exchange_over_edge_groups) == [[50.0, 55.0, 60.0], [0.0, 5.0, 10.0]]
