"""The native step is torch's step; its bits depend neither on cuts of the slice nor on the number of threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from shoal.native import build
from shoal.native.step import _VERSION, DTYPES, Rule, available, step  # pyright: ignore[reportPrivateUsage]
from shoal.optim.lion import Lion
from shoal.optim.step_pass import _PLANS, has_native_options, snapshot_options  # pyright: ignore[reportPrivateUsage]

SIZE = 100_003
pytestmark = pytest.mark.skipif(not available(), reason="native code needs a C++ compiler")

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "Adam": lambda p: Adam(p, lr=1e-2, weight_decay=0.1), "AdamW": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adam, decoupled": lambda p: Adam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "SGD": lambda p: SGD(p, lr=1e-2, weight_decay=0.1), "momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),
    "Nesterov": lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": lambda p: Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.1),
    "Lion": lambda p: Lion(p, lr=1e-2, weight_decay=0.1),
}


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(SIZE).to(dtype) for _ in range(4)]


def stepped(optimizer: Optimizer, parameter: nn.Parameter, found: list[Tensor], *, factor: float = 1.0,
            weight: Tensor | None = None) -> None:
    plan = _PLANS[type(optimizer)]
    for gradient in found:
        rule, moments, constants = plan(optimizer.param_groups[0], optimizer.state[parameter],
                                        lambda _: torch.zeros_like(parameter, requires_grad=False))
        step(rule, parameter.detach(), moments, gradient, constants, factor=factor, weight=weight)


def made(name: str) -> tuple[nn.Parameter, Optimizer]:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(SIZE))
    return parameter, OPTIMIZERS[name]([parameter])


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_four_steps_give_the_weights_and_the_state_of_torch(name: str) -> None:
    ours, native = made(name)
    theirs, optimizer = made(name)
    stepped(native, ours, gradients())
    for gradient in gradients():
        theirs.grad = gradient
        optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert native.state[ours].keys() == {key for key, value in optimizer.state[theirs].items() if value is not None}
    for key, value in native.state[ours].items():
        torch.testing.assert_close(value, optimizer.state[theirs][key], rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_the_fused_pass_rounds_as_separate_passes_do(gradient_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    ours, native = made("AdamW")
    theirs, other = made("AdamW")
    weight = torch.empty(SIZE, dtype=weight_dtype)
    stepped(native, ours, gradients(gradient_dtype), factor=1 / 128, weight=weight)
    stepped(other, theirs, [gradient.float() / 128 for gradient in gradients(gradient_dtype)])
    assert torch.equal(ours, theirs)
    assert torch.equal(weight, theirs.to(weight_dtype))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads_or_cuts(name: str, dtype: torch.dtype) -> None:
    whole, native = made(name)
    threads = torch.get_num_threads()
    weight = torch.empty(SIZE, dtype=dtype)
    stepped(native, whole, gradients(dtype), weight=weight)
    try:
        torch.set_num_threads(3)
        many, native = made(name)
        other = torch.empty(SIZE, dtype=dtype)
        stepped(native, many, gradients(dtype), weight=other)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole, many) and torch.equal(weight, other)
    for start, stop in ((0, 1), (1, 7), (7, 1031), (1031, 50_000), (50_000, SIZE)):
        torch.manual_seed(0)
        piece = nn.Parameter(torch.randn(SIZE)[start:stop].clone())
        stepped(native := OPTIMIZERS[name]([piece]), piece, [gradient[start:stop] for gradient in gradients(dtype)])
        assert torch.equal(piece, whole[start:stop]), (start, stop)


EDGES = [0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 1e6, 2**-24, 2**-25, 1.5 * 2**-25, 2**-14, 2**-14 - 2**-25, 1e-30,
         3.4e38, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_values_are_converted_as_torch_converts_them(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    for values in (every, every[:7].clone()):  # SIMD loop, and its tail
        master = torch.zeros(values.numel())
        step(Rule.SGD, master, [], values, [-1.0, 0.0, 1.0, 0.0])  # weight = 0 + gradient
        assert torch.equal(master.nan_to_num(nan=7), values.float().nan_to_num(nan=7))
    torch.manual_seed(0)
    wide = torch.cat([torch.tensor(EDGES), -torch.tensor(EDGES), torch.randn(5000) * torch.logspace(-42, 38, 5000)])
    for values in (wide, wide[:5].clone(), wide[5:17].clone()):
        narrow = torch.empty(values.numel(), dtype=dtype)
        zeros = torch.zeros_like(values)
        step(Rule.LION, values.clone(), [zeros.clone()], zeros, [0.0] * 4, weight=narrow)  # the update is zero
        expected = values.to(dtype)
        assert torch.equal(narrow.isnan(), expected.isnan())
        assert torch.equal(narrow.nan_to_num(nan=0), expected.nan_to_num(nan=0))


def plain(optimizer: torch.optim.Optimizer) -> bool:
    return has_native_options(optimizer, snapshot_options(optimizer))


def test_options_hooks_and_patches_disable_the_native_step() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    assert plain(AdamW([parameter]))
    assert not plain(AdamW([parameter], amsgrad=True))
    assert not plain(AdamW([parameter], maximize=True))
    hooked = AdamW([parameter])
    hooked.register_step_post_hook(lambda *_: None)
    assert not plain(hooked)
    scheduled, patched = AdamW([parameter]), AdamW([parameter])
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert plain(scheduled)
    patched.step = lambda: None  # type: ignore[method-assign]
    assert not plain(patched)


# Building


@pytest.fixture
def empty_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "load", build.load.__wrapped__)
    return tmp_path


def test_a_library_is_built_once_and_rebuilt_when_damaged(empty_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.load("step").shoal_step_version() == _VERSION
    [library] = (empty_cache / "cache").iterdir()
    built = library.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(build, "_build", lambda *_: pytest.fail("built again"))
        assert build.load("step") is not None
    other = empty_cache / "other"
    other.mkdir()
    monkeypatch.setenv("SHOAL_CACHE", str(other))
    (other / library.name).write_bytes(built[:1000])
    assert build.load("step").shoal_step_version() == _VERSION
    assert [path.name for path in other.iterdir()] == [library.name]


@pytest.mark.parametrize("failure", ["no compiler", "a compiler that fails", "a folder that cannot be made", "switched off"])
def test_a_failed_build_warns_and_gives_no_library(empty_cache: Any, monkeypatch: pytest.MonkeyPatch, failure: str,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "warn_once", logging.getLogger("shoal").warning)
    if failure == "no compiler":
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
    elif failure == "a compiler that fails":
        monkeypatch.setenv("CXX", "false")
        monkeypatch.setattr(build, "_key", lambda *_: "key")
    elif failure == "a folder that cannot be made":
        (empty_cache / "cache").write_text("a file")
    else:
        monkeypatch.setenv("SHOAL_NATIVE", "0")
    assert build.load("step") is None
    assert ("native code is not available (step.cpp" in caplog.text) == (failure != "switched off")
