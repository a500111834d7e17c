"""Quantised parameters: codes and scales are rank 0's, on the device, and as they were, whatever dtype stores the codes."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.engine.buffer_sync import _scales
from shoal.errors import RanksDisagree
from shoal.testing import ranks_on, run_ranks
from tests.late.ranks import prepare


class _State:
    """The scales of a parameter and, where these are quantised too, theirs; as in bitsandbytes."""

    def __init__(self, absmax: Tensor, nested: _State | None = None):
        self.absmax, self.nested = absmax, nested

    def to(self, device: Any) -> None:
        self.absmax = self.absmax.to(device)
        if self.nested is not None:
            self.nested.to(device)


class _FourBit(nn.Parameter):
    """A parameter whose `to` moves the state of its codes."""

    quant_state: _State

    def __new__(cls, codes: Tensor, state: _State) -> Self:
        self = torch.Tensor._make_subclass(cls, codes, False)
        self.quant_state = state
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        self.quant_state.to(device)
        return _FourBit(torch.Tensor.to(self, *args, **kwargs), self.quant_state)


class _EightBit(nn.Parameter):
    """A parameter with its codes once more, and scales that its `to` forgets."""

    CB: Tensor
    SCB: Tensor

    def __new__(cls, codes: Tensor, scales: Tensor) -> Self:
        self = torch.Tensor._make_subclass(cls, codes, False)
        self.CB, self.SCB = self.data, scales
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return _EightBit(torch.Tensor.to(self, *args, **kwargs), self.SCB)


class _Quantised(nn.Module):
    """Layers of 4 and 8 bits, whose codes and scales each rank draws by itself."""

    def __init__(self, storage: torch.dtype, seed: int, groups: int = 64):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.codes = torch.randint(0, 256, (64 * 32,), dtype=torch.uint8, generator=draw)
        self.bytes = torch.randint(0, 127, (64, 64), dtype=torch.int8, generator=draw)
        self.scales = [torch.rand(size, generator=draw) for size in (groups, 8, 64)]
        state = _State(self.scales[0].clone(), _State(self.scales[1].clone()))
        self.four = _FourBit(self.codes.clone().view(storage), state)
        self.eight = _EightBit(self.bytes.clone(), self.scales[2].clone())
        self.first, self.last = nn.Linear(32, 32), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = self.four.quant_state
        assert state.nested is not None
        four = (self.four.view(torch.uint8).view(64, 32).to(x.dtype) - 127) * state.absmax[:, None].to(x.dtype)
        eight = self.eight.CB.to(x.dtype) * self.eight.SCB[:, None].to(x.dtype)
        return self.last(self.first(x) @ four.T @ eight * state.nested.absmax.sum().to(x.dtype))


def _initialized(storage: torch.dtype, bf16: bool, stage: int, groups: int = 0) -> tuple[list[str], list[Tensor]]:
    """Return the devices of codes and scales, and their values, after a step."""
    model = _Quantised(storage, dist.get_rank(), groups=64 + groups * dist.get_rank())
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "log_level": "error", "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]
    x = torch.ones(2, 32, dtype=torch.bfloat16 if bf16 else torch.float32, device=engine.device)
    engine.backward(engine(x).float().mean())
    engine.step()
    state = model.four.quant_state
    assert state.nested is not None
    found = [model.four.detach(), model.eight.detach(), model.eight.CB, state.absmax, state.nested.absmax, model.eight.SCB]
    return [each.device.type for each in found], [each.cpu().contiguous() for each in found]


def _check(found: list[tuple[list[str], list[Tensor]]], storage: torch.dtype, device: str) -> None:
    first = _Quantised(storage, 0)
    for devices, (four, *others) in found:
        assert devices == [device] * 6
        assert four.dtype == storage and torch.equal(four.view(torch.uint8), first.codes)
        assert all(map(torch.equal, others, [first.bytes, first.bytes, *first.scales]))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_quantised_parameters_are_those_of_rank_0_on_the_device(storage: torch.dtype, bf16: bool, stage: int) -> None:
    with ranks_on(prepare):
        _check(run_ranks(2, _initialized, storage, bf16, stage), storage, "late")


def test_quantised_parameters_are_those_of_rank_0_on_the_cpu() -> None:
    _check(run_ranks(2, _initialized, torch.bfloat16, True, 3), torch.bfloat16, "cpu")


def _disagree() -> str:
    try:
        _initialized(torch.uint8, False, 0, groups=1)
    except RanksDisagree as error:
        return str(error)
    return ""


def test_ranks_with_other_scales_than_each_other_are_told() -> None:
    for said in run_ranks(2, _disagree):
        at = "'four, quant_state.absmax'"
        assert f"rank 0 has {at} (64,) torch.float32, rank 1 has {at} (65,) torch.float32; build and quantise" in said


def _have_codes_on_one_rank() -> str:
    model = nn.Linear(32, 8)
    if dist.get_rank():
        model.codes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    try:
        shoal.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}})
    except RanksDisagree as error:
        return str(error)
    return ""


def test_codes_that_only_one_rank_has_are_told_and_do_not_hang() -> None:
    for said in run_ranks(2, _have_codes_on_one_rank):
        assert "rank 0 has nothing, rank 1 has 'codes' (4,) torch.uint8; build and quantise" in said


def test_scales_are_not_sought_in_modules_of_python_that_a_parameter_names() -> None:
    model = _Quantised(torch.uint8, 0)
    model.four.quant_state.library = torch.nn.functional  # type: ignore
    model.four.quant_state.quantise = torch.manual_seed  # type: ignore
    assert [at for at, _ in _scales(model.four, set())] == ["quant_state.absmax", "quant_state.nested.absmax"]
