"""On an accelerator collectives are timed by events, without synchronization."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn

import shoal
from shoal import comm
from shoal.transport.collectives import traffic

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; here is none")]


def test_collectives_of_a_gpu_are_timed_without_synchronization(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3}, "comms_logger": {},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine = shoal.initialize(model=nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), config=config)[0]
    x = torch.randn(8, 256, device="cuda")

    def step() -> None:
        engine.backward(engine(x).pow(2).mean())
        engine.step()

    step()  # the first call calibrates the clock of the device
    comm.reset_log()
    step()
    synchronized: list[object] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: synchronized.append(args))
    step()
    assert synchronized == []
    monkeypatch.undo()
    with contextlib.redirect_stdout(io.StringIO()):
        rows = comm.log_summary(show_straggler=True)
    assert traffic.recorder is not None
    assert any(row.timed for row in rows) and all(row.seconds >= row.exposed >= 0 for row in rows)
    comm.configure(enabled=False)
