"""gloo's thread runs under the policy `SCHED_BATCH` from the first engine on; no other thread's policy changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.testing import run_ranks
from shoal.transport import gloo_threads

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="this system has no scheduling policies")


def policies() -> dict[str, set[int]]:
    """Return the policies of this process's threads, by the name of the thread."""
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        found.setdefault((task / "comm").read_text().strip(), set()).add(os.sched_getscheduler(int(task.name)))
    return found


def policies_with_an_engine() -> dict[str, set[int]]:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = shoal.initialize(model=nn.Linear(2, 2), config=config)[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    return policies()


def test_gloo_yields_to_the_threads_of_a_rank() -> None:
    for found in run_ranks(2, policies_with_an_engine):
        assert found.pop(gloo_threads._LOOP) == {os.SCHED_BATCH}  # pyright: ignore[reportPrivateUsage]
        assert set.union(*found.values()) == {os.SCHED_OTHER}


def test_a_system_that_forbids_the_call_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(gloo_threads, "_LOOP", Path("/proc/self/comm").read_text().strip())
    gloo_threads.let_ranks_go_first()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_thread_with_a_policy_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(gloo_threads, "_LOOP", Path("/proc/self/comm").read_text().strip())
    monkeypatch.setattr(os, "sched_getscheduler", lambda thread: os.SCHED_RR)
    monkeypatch.setattr(os, "sched_setscheduler", lambda thread, *_: set_to.append(thread))
    gloo_threads.let_ranks_go_first()
    assert not set_to
