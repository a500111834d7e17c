"""Tensors are on the rank's device where torch or the transport needs them there."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import NotSupportedYet
from shoal.onebit import packing, reference
from shoal.optim import grad_stats
from shoal.optim.views import MasterView
from shoal.testing import run_ranks
from shoal.transport import reduction
from shoal.transport.collectives import Communicator
from shoal.transport.reduction import DONE, Reduction

from .trained import build

DEVICE = torch.device("meta")  # of another kind than the host


@pytest.mark.parametrize(("options", "found"), [
    ({}, "cpu"), ({"fused": None, "capturable": False}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta"),
])  # fmt: skip
def test_a_loaded_step_count_is_on_the_device_that_torch_would_use(options: dict[str, object], found: str) -> None:
    view: Any = SimpleNamespace(parameter=nn.Parameter(torch.empty(2, device=DEVICE)))
    assert MasterView.number_device(view, options).type == found


def test_a_rank_without_units_gathers_words_on_its_device() -> None:
    sent: list[Tensor] = []

    def gather_words(words: Tensor, what: str = "") -> Tensor:
        sent.append(words)
        return torch.zeros(2, 1, dtype=torch.int64)

    everyone = SimpleNamespace(gather_words=gather_words, gather_step_words=gather_words, words_device=torch.device("cpu"))
    parameter_groups: Any = SimpleNamespace(world=everyone, communicators=[everyone])
    assert grad_stats.reduce_grad_stats([], parameter_groups, norm=True, device=DEVICE).norm is not None
    assert [words.device for words in sent] == [DEVICE]


@pytest.mark.parametrize(("device", "parts"), [("cpu", 8), ("meta", 1)])
def test_sums_are_chunked_to_the_host_cache_and_whole_on_a_device(
        device: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    monkeypatch.setattr(reduction, "sum_addends", lambda addends, target, *_: summed.append(target.numel()))
    addends = [torch.ones(256, dtype=torch.bfloat16, device=device) for _ in range(2)]
    Reduction(DONE, addends, torch.empty(256, device=device), 1.0, False, chunk_bytes=256).wait()
    assert summed == [256 // parts] * parts


def test_broken_triton_falls_back_to_torch_with_a_warning(monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    def pack(values: Tensor, packed: Tensor) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(packing, "import_module", lambda name: SimpleNamespace(pack=pack))
    with caplog.at_level("WARNING", logger="shoal"):
        assert packing._triton_or_reference(torch.device("cpu")) is reference
    assert "Triton does not work here (RuntimeError: Failed to find C compiler)" in caplog.text
    assert [name for name in caplog.text.splitlines() if "slower" in name]


def test_working_triton_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    working = import_module("shoal.onebit.reference")
    monkeypatch.setattr(packing, "import_module", lambda name: working)
    assert packing._triton_or_reference(torch.device("cpu")) is working


def native_by_backends() -> list[bool]:
    named = dist.new_group(backend="cpu:gloo")
    return [Communicator(group, timeout=20).native for group in (dist.group.WORLD, named) if group is not None]


def test_gloo_is_recognised_under_every_backend_name() -> None:
    assert run_ranks(2, native_by_backends) == [[False, False]] * 2


def _without_float64() -> bool:
    with (pytest.MonkeyPatch.context() as patch,
          pytest.raises(NotSupportedYet, match=r"cpu: the device has no float64.*dist_backend='gloo'")):
        patch.setattr("shoal.engine.build.has_float64", lambda device: False)
        build()
    return True


@pytest.mark.host("the message names the CPU")
def test_a_device_without_float64_is_refused() -> None:
    assert run_ranks(1, _without_float64) == [True]
