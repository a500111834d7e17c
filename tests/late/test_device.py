"""The late device defers what a GPU may defer, and nothing that a program may rely on.

Each law runs in a process of its own, because a process has one accelerator for its lifetime.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoal.testing import run_ranks
from tests.late.device import load, queued, seed

SEEDS = 50


def _ones(device: torch.device, elements: int = 1024) -> Tensor:
    return torch.ones(elements, device=device)


def operators_wait_for_a_read() -> None:
    x = _ones(load()) * 2
    assert queued() > 0
    total = x.sum()
    assert total.item() == 2048
    assert queued() == 0


def a_read_runs_only_what_it_needs() -> None:
    device = load()
    other = torch.Stream(device)
    with other:
        _ones(device).mul_(3)
    waiting = queued()
    x = _ones(device)
    total = x.sum()
    assert total.item() == 1024
    assert queued() == waiting


def another_stream_sees_nan_without_an_event() -> None:
    device = load()
    other = torch.Stream(device)
    x = _ones(device)
    with other:
        early = (x + 1).sum().item()
    event = torch.Event(device)
    event.record()
    other.wait_event(event)
    with other:
        late = (x + 1).sum().item()
    assert early != early and late == 2048


def _wrong(program: Callable[[torch.device, bool], float], right: float, *, ordered: bool) -> int:
    """Return in how many of the seeds `program` gives another number than `right`."""
    device = load()
    wrong = 0
    for number in range(SEEDS):
        seed(number)
        wrong += program(device, ordered) != right
        torch.accelerator.synchronize()
    return wrong


def _overwrite(device: torch.device, ordered: bool) -> float:
    """Read on one stream what the current stream overwrites afterwards."""
    other = torch.Stream(device)
    x = _ones(device)
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        read = x.sum()
    if ordered:
        torch.accelerator.current_stream().wait_stream(other)
    x.zero_()
    x.sum().item()
    with other:
        return read.item()


def _free(device: torch.device, ordered: bool) -> float:
    """Free memory that another stream still reads."""
    other = torch.Stream(device)
    x = _ones(device)
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        read = x.sum()
    if ordered:
        x.record_stream(other)
    del x
    _ones(device, 8).sum().item()
    with other:
        return read.item()


def a_missing_wait_before_an_overwrite_is_found() -> None:
    assert _wrong(_overwrite, 1024, ordered=False) > 0
    assert _wrong(_overwrite, 1024, ordered=True) == 0


def a_free_without_record_stream_is_found() -> None:
    assert _wrong(_free, 1024, ordered=False) > 0
    assert _wrong(_free, 1024, ordered=True) == 0


def freed_memory_is_reused_at_once_by_its_stream_only() -> None:
    device = load()
    x = _ones(device)
    address = x.data_ptr()
    del x
    with torch.Stream(device):
        assert _ones(device).data_ptr() != address
    x = torch.empty(1024, device=device)
    assert x.data_ptr() == address
    other = torch.Stream(device)
    with other:
        (x * 2).sum()
    x.record_stream(other)
    del x
    assert torch.empty(1024, device=device).data_ptr() != address
    other.synchronize()
    assert torch.empty(1024, device=device).data_ptr() == address
    assert torch.empty(1024, device=device).isnan().all().item()


def pinned_memory_is_copied_late_and_kept() -> None:
    device = load()
    pinned, pageable = torch.ones(256, pin_memory=True), torch.ones(256)
    assert pinned.is_pinned() and not pageable.is_pinned()
    from_pinned = pinned.to(device, non_blocking=True)
    from_pageable = pageable.to(device, non_blocking=True)
    pinned.fill_(2)
    pageable.fill_(2)
    address = pinned.data_ptr()
    del pinned
    assert torch.empty(256, pin_memory=True).data_ptr() != address
    assert from_pinned.sum().item() == 512
    assert from_pageable.sum().item() == 256
    back = torch.zeros(256, pin_memory=True)
    back.copy_(from_pageable, non_blocking=True)
    assert back.sum().item() == 0
    torch.accelerator.synchronize()
    assert back.sum().item() == 256


def storages_are_freed_and_refilled() -> None:
    device = load()
    x = _ones(device)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was it resized"):
        x.add(1)
    x.untyped_storage().resize_(4096)
    assert x.isnan().all().item()
    x.fill_(3)
    x.untyped_storage().resize_(8192)
    assert x.sum().item() == 3072


def events_are_reached_by_waiting_or_by_asking() -> None:
    device = load()
    start, stop = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    assert start.query()
    _ones(device)
    start.record()
    _ones(device)
    stop.record()
    assert not stop.query()
    start.synchronize()
    assert start.query() and queued() > 0
    for _ in range(3):
        stop.query()
    assert stop.query()
    assert start.elapsed_time(stop) >= 0


def errors_of_a_task_reach_the_host_at_its_next_wait() -> None:
    device = load()
    rows = torch.embedding(torch.ones(4, 2, device=device), torch.tensor([7], device=device))
    with pytest.raises(IndexError, match="out of range"):
        rows.sum().item()
    assert _ones(device).sum().item() == 1024


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(x)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, 16)
        self.blocks = nn.Sequential(_Block(), _Block())
        self.head = nn.Linear(16, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(self.rows(tokens))).flatten(0, 1), tokens.flatten())


def _train(model: nn.Module, tokens: Tensor, *, fused: bool) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    losses: list[Tensor] = []
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def training_is_bitwise_the_cpus() -> None:
    device = load()
    torch.manual_seed(0)
    model, tokens = _Model(), torch.randint(0, 11, (2, 5))
    for fused, dtype in ((True, torch.float32), (False, torch.float32), (True, torch.bfloat16)):
        theirs = _train(copy.deepcopy(model).to(dtype), tokens, fused=fused)
        for number in (0, 1, 2):
            seed(number)
            ours = _train(copy.deepcopy(model).to(device, dtype), tokens.to(device), fused=fused)
            assert all(torch.equal(one.cpu(), other) for one, other in zip(ours, theirs, strict=True))


def hooks_of_a_backward_run_on_the_device_thread() -> None:
    device = load()
    threads: list[int] = []
    x = torch.ones(4, device=device, requires_grad=True)
    other = torch.Stream(device)
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        y = (x * 2).square()
    torch.accelerator.current_stream().wait_stream(other)
    y.register_hook(lambda grad: threads.append(threading.get_ident()))
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [8.0] * 4
    assert threads and threads[0] != threading.get_ident()


LAWS = [operators_wait_for_a_read, a_read_runs_only_what_it_needs, another_stream_sees_nan_without_an_event,
        a_missing_wait_before_an_overwrite_is_found, a_free_without_record_stream_is_found,
        freed_memory_is_reused_at_once_by_its_stream_only, pinned_memory_is_copied_late_and_kept,
        storages_are_freed_and_refilled, events_are_reached_by_waiting_or_by_asking,
        errors_of_a_task_reach_the_host_at_its_next_wait, training_is_bitwise_the_cpus,
        hooks_of_a_backward_run_on_the_device_thread]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_on_the_late_device(law: Callable[[], None]) -> None:
    run_ranks(1, law)
