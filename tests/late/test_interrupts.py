"""Hooks run in the device thread of autograd; Ctrl-C meanwhile ends the call in the main thread, and training goes on."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.testing import ranks_on, run_ranks
from tests.late.ranks import prepare

WIDTH, STEPS = 16, 4


def _trained(stage: int, interrupted: bool) -> tuple[list[Tensor], bool]:
    """Return the weights after `STEPS` microbatches, and whether a hook ran in another thread than this one."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "log_level": "error", "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]
    due, threads = {2} if interrupted else set[int](), set[int]()

    def interrupt(gradient: Tensor) -> None:
        threads.add(threading.get_ident())
        if engine.micro_steps in due:
            due.remove(engine.micro_steps)
            signal.raise_signal(signal.SIGINT)

    caught = False
    while engine.micro_steps < STEPS:
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(engine.micro_steps)).to(engine.device)
        try:
            out = engine(x)
            out.register_hook(interrupt)
            engine.backward(out.square().mean())
            engine.step()
        except KeyboardInterrupt:
            caught = True
            engine.zero_grad()
    assert caught == interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with shoal.gathered(model):
        return [parameter.detach().cpu() for parameter in model.parameters()], threads.isdisjoint({threading.get_ident()})


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_interrupted_on_the_device_thread_is_repeated(stage: int) -> None:
    with ranks_on(prepare):
        [(straight, apart)] = run_ranks(1, _trained, stage, False)
        [(found, _)] = run_ranks(1, _trained, stage, True)
    assert apart, "hooks ran in the main thread"
    assert all(torch.equal(one, other) for one, other in zip(straight, found, strict=True))
