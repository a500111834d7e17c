"""The host gives the device whole steps without waiting for it: what it decides, it decides on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.compat.parameters import safe_set_full_optimizer_state
from shoal.testing import ranks_on, run_ranks
from tests.late.ranks import prepare

STEPS = 4


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])


def _inputs() -> list[torch.Tensor]:
    return [torch.randn(4, 16, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]


class _Reads(TorchDispatchMode):
    """Notes the operators by which the host reads values of the device, and so waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        of_device = any(isinstance(arg, torch.Tensor) and arg.device.type != "cpu" for arg in args)
        copies = (func is aten._to_copy.default and str(kwargs.get("device", "late")) == "cpu") or (
            func is aten.copy_.default and args[0].device.type == "cpu")
        if of_device and (copies or func in (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default)):
            self.found.append(str(func))
        return func(*args, **kwargs)


def _steps(stage: int, clipping: float, more: dict[str, Any]) -> tuple[list[str], list[float], float | None]:
    """Return the host's reads of the device in the steps, then the sums of the weights and the norm of the last step."""
    model = _model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": clipping, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more}
    engine = shoal.initialize(model=model, config=config)[0]
    inputs = [x.to(engine.device, next(model.parameters()).dtype) for x in _inputs()]
    with _Reads() as reads:
        for x in inputs:
            engine.backward(engine(x).square().mean())
            engine.step()
    norm = engine.get_global_grad_norm()
    with shoal.gathered(model):
        sums = [parameter.double().sum().item() for parameter in model.parameters()]
    return reads.found, sums, norm


def _plain(clipping: float) -> tuple[list[float], float]:
    model, norm = _model(), torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for x in _inputs():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clipping or float("inf"))
        optimizer.step()
    return [parameter.double().sum().item() for parameter in model.parameters()], norm.item()


@pytest.mark.parametrize("clipping", [0.0, 0.1])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_steps_wait_for_nothing_with_clipping_and_without(stage: int, ranks: int, clipping: float) -> None:
    sums, norm = _plain(clipping)
    with ranks_on(prepare):
        for reads, found, found_norm in run_ranks(ranks, _steps, stage, clipping, {}):
            assert reads == []
            assert found == pytest.approx(sums, rel=1e-3)
            assert found_norm == pytest.approx(norm, rel=1e-3)


def _state_written_first() -> set[tuple[str, float]]:
    """Return the devices and values of the counts of steps of an optimizer whose state was written before its first."""
    engine = shoal.initialize(model=(model := _model()), config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "log_level": "error",
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}})[0]
    safe_set_full_optimizer_state(model[0].weight, torch.full((16, 16), 0.5), "exp_avg_sq")
    engine.backward(engine(_inputs()[0].to(engine.device)).square().mean())
    engine.step()
    steps = [state["step"] for state in engine.optimizer.optimizer.state.values()]
    return {(step.device.type, step.item()) for step in steps}


def test_state_that_is_written_first_serves_a_fused_step() -> None:
    with ranks_on(prepare):
        assert run_ranks(1, _state_written_first) == [{("late", 1.0)}]


@pytest.mark.parametrize("checked", [True, False])
def test_a_step_in_bf16_reads_one_flag_unless_nothing_is_checked(checked: bool) -> None:
    with ranks_on(prepare):
        [(reads, _, _)] = run_ranks(1, _steps, 2, 0.1, {"bf16": {"enabled": True, "check_grad_overflow": checked}})
    assert len(reads) == (STEPS if checked else 0)


def _lr_on_device() -> tuple[list[str], list[float]]:
    """Return the host's reads of the device in steps whose learning rate, there too, a script halves; then the weights."""
    model = _model().to("late")
    rate = torch.tensor(0.1, device="late")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    engine = shoal.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 4, "log_level": "error", "zero_optimization": {"stage": 2}})[0]
    inputs = [x.to(engine.device) for x in _inputs()]
    with _Reads() as reads:
        for x in inputs:
            engine.backward(engine(x).square().mean())
            engine.step()
            rate.mul_(0.5)
    return reads.found, [parameter.double().sum().item() for parameter in model.parameters()]


def test_a_learning_rate_on_the_device_is_not_read() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for x in _inputs():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    with ranks_on(prepare):
        [(reads, sums)] = run_ranks(1, _lr_on_device)
    assert reads == []
    assert sums == pytest.approx([parameter.double().sum().item() for parameter in model.parameters()], rel=1e-3)
