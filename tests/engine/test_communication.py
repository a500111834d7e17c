"""Communication options hold at every stage: the dtype, the chunk size, and when reductions are launched."""

from __future__ import annotations

from collections import defaultdict
from math import ceil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.engine.engine import Engine
from shoal.testing import run_ranks
from shoal.transport.collectives import Label, traffic

from ..zero.test_cost import Wide

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, None: 4}
UNITS, UNIT = 7, 64 * 64 + 64
"""The units of the model, and the elements of one."""


def engine_of(stage: int, compute: str = "fp32", **extra: Any) -> Engine:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "timeout": 20, "direct_bytes": None, "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage, **extra.pop("zero", {})},
        **({} if compute == "fp32" else {compute: {"enabled": True, "check_grad_overflow": False}}), **extra,
    }
    return shoal.initialize(model=Wide(), config=config)[0]


def step(engine: Engine) -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(engine.global_rank)).to(engine.policy.compute)
    engine.backward(engine(x).float().pow(2).mean())
    engine.step()
    if engine.zero_optimization_stage() < 3:
        engine.module.state_dict()  # waits for outstanding gathers


def bytes_of_a_step(stage: int, compute: str, extra: dict[str, Any]) -> dict[str, int]:
    engine = engine_of(stage, compute, **extra)
    step(engine)
    before = traffic.bytes.copy()
    step(engine)
    return {kind: size for kind, size in (traffic.bytes - before).items() if kind != "words"}


@pytest.mark.parametrize(("compute", "wire"), [("fp32", None), ("fp32", "fp16"), ("fp32", "bf16"), ("bf16", "fp32")])
@pytest.mark.parametrize("stage", range(4))
def test_gradients_travel_in_the_communication_dtype_weights_do_not(stage: int, compute: str,
                                                                    wire: str | None) -> None:
    sent = UNITS * UNIT // 2  # a half of the model, on two ranks
    weights, reduced = sent * BYTES[compute], sent * BYTES[wire or compute]
    expected = {"reduce": reduced}
    if stage == 0:
        expected["replicate"] = min(weights, reduced)  # a sum is replicated in the narrower of both dtypes
    elif stage < 3:
        expected["publish"] = weights
    else:
        expected["gather"] = 2 * weights
    assert run_ranks(2, bytes_of_a_step, stage, compute, {"communication_data_type": wire}) == [expected] * 2


def test_replicas_are_reduced_in_the_communication_dtype_too() -> None:
    found = run_ranks(4, bytes_of_a_step, 1, "fp32", {"communication_data_type": "bf16", "zero": {"mics_shard_size": 2}})
    half, quarter = UNITS * UNIT // 2, UNITS * UNIT // 4
    expected = {"reduce": 2 * (half + quarter), "replicate": 2 * quarter, "publish": 4 * half}
    assert found == [expected] * 4


def equal_on_all_ranks(stage: int, zero: dict[str, Any]) -> bool:
    engine = engine_of(stage, communication_data_type="bf16", zero=zero)
    step(engine)
    with shoal.gathered(engine.module):
        mine = torch.cat([parameter.detach().flatten() for parameter in engine.module.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


@pytest.mark.parametrize(("ranks", "stage", "zero"), [(3, 0, {}), (4, 1, {"mics_shard_size": 2})])
def test_gradients_reduced_in_a_narrow_dtype_are_equal_on_all_ranks(ranks: int, stage: int,
                                                                    zero: dict[str, Any]) -> None:
    assert run_ranks(ranks, equal_on_all_ranks, stage, zero) == [True] * ranks


class Counting:
    """A process group that records the elements of every message."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.sent: defaultdict[str, list[int]] = defaultdict(list)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        first = Label(kind="gather", unit="", index=0).tag
        if tag >= first:
            self.sent[Label.KINDS[(tag - first) % len(Label.KINDS)]].append(tensors[0].numel())
        return self.group.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        return self.group.recv(tensors, peer, tag)


def messages_of_a_step(stage: int, reduce: int, gather: int) -> dict[str, list[int]]:
    engine = engine_of(stage, zero={"reduce_bucket_size": reduce, "allgather_bucket_size": gather})
    step(engine)
    engine.communicator.group = counting = Counting(engine.communicator.group)  # type: ignore[assignment]
    step(engine)
    return {kind: [*sorted(set(sizes)), len(sizes)] for kind, sizes in counting.sent.items()}


@pytest.mark.parametrize("stage", range(4))
def test_messages_are_chunks_of_the_bucket_size(stage: int) -> None:
    ranks, reduce, gather = 2, 1000, 600
    span = UNIT // ranks

    def pieces(bucket: int, collectives: int) -> list[int]:
        most = bucket // ranks
        return [*sorted({most, span % most}), ceil(span / most) * collectives]

    other = {0: {"replicate": pieces(gather, UNITS)}, 3: {"gather": pieces(gather, 2 * UNITS)}}
    expected = {"reduce": pieces(reduce, UNITS), **other.get(stage, {"publish": pieces(gather, UNITS)})}
    assert run_ranks(ranks, messages_of_a_step, stage, reduce, gather) == [expected] * ranks


def reductions_within_backward(stage: int, overlap: bool, accumulation: int) -> list[int]:
    """Return the number of reductions that were launched when backward reached the model's first layer, by microbatch."""
    engine = engine_of(stage, zero={"overlap_comm": overlap}, gradient_accumulation_steps=accumulation)
    found: list[int] = []
    before = 0

    def watch(*arguments: Any) -> None:
        arguments[-1].register_hook(lambda _: found.append(traffic.calls["reduce"] - before))

    engine.module.first.register_forward_hook(watch)
    for _ in range(accumulation):
        before = traffic.calls["reduce"]
        step(engine)
    return found


@pytest.mark.parametrize("stage", range(4))
def test_overlap_comm_launches_reductions_within_backward(stage: int) -> None:
    inside = run_ranks(2, reductions_within_backward, stage, True, 2)[0]
    assert inside[-1] >= UNITS - 2
    assert (inside[0] == 0) == (stage < 2)  # gradients that rest whole are reduced at the boundary alone
    assert run_ranks(2, reductions_within_backward, stage, False, 2)[0] == [0, 0]
