"""After Ctrl-C at any moment training can continue in the same process, and reaches the same weights."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.interrupts import sigint_handler, unbroken, uninterrupted
from shoal.testing import run_ranks

WIDTH, STEPS = 96, 60
DISK: dict[str, Any] = {"offload_param": {"device": "nvme", "buffer_count": 2},
                        "offload_optimizer": {"device": "nvme", "buffer_count": 2}}
WAYS: dict[str, dict[str, Any]] = {
    "memory": {}, "after backward": DISK,
    "in backward": {**DISK, "offload_optimizer": {**DISK["offload_optimizer"], "step_in_backward": True}},
}


def engine_of(folder: str, way: str, accumulation: int = 1) -> shoal.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)))
    tiers = {key: {**block, "nvme_path": folder} for key, block in WAYS[way].items()}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation, "timeout": 20,
              "gradient_clipping": 0.0 if way == "in backward" else 1e6, "zero_optimization": {"stage": 3, **tiers},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    return shoal.initialize(model=model, config=config)[0]


def step(engine: shoal.Engine) -> None:
    """Train on the next microbatch."""
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(engine.micro_steps))
    engine.backward(engine(x).pow(2).mean())
    engine.step()


def weights(engine: shoal.Engine) -> list[Tensor]:
    return [value.clone() for value in (engine.consolidated_state_dict() or {}).values()]


def interrupts(seconds: float, call: Callable[[], object]) -> bool:
    """Call `call`, and interrupt it after `seconds`; return whether it was still running."""
    signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def trained(folder: str, way: str, accumulation: int, seed: int | None) -> tuple[int, list[Tensor]]:
    """Train on `STEPS` microbatches, interrupted at random if there is a seed; return how often, and the weights."""
    engine, chance, count = engine_of(folder, way, accumulation), random.Random(seed), 0
    longest = 0.0  # of the seconds after which a step is interrupted: it follows the pace of a machine that others use too
    while engine.micro_steps < STEPS:
        begin = time.perf_counter()
        if seed is None or engine.micro_steps < 3:
            step(engine)
            interrupted = False
        else:
            interrupted = interrupts(chance.uniform(1e-4, longest), partial(step, engine))
        longest = 1.5 * longest if interrupted else 1.5 * (time.perf_counter() - begin)
        if interrupted:
            count += 1
            torch.set_grad_enabled(True)  # torch's own contexts may be cut short
            assert engine.optimizer is not None
            engine.step() if engine.optimizer.begun else engine.zero_grad()
    found = weights(engine)
    engine.destroy()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert saving() is None, "saved-tensor hooks were left behind"
    return count, found


def saving() -> object:
    """Return autograd's current saved-tensor hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_training_interrupted_at_random_reaches_the_same_weights(
        way: str, accumulation: int, tmp_path: Path) -> None:
    [(_, straight)] = run_ranks(1, trained, str(tmp_path), way, accumulation, None)
    for seed in (1, 2):
        [(count, found)] = run_ranks(1, trained, str(tmp_path), way, accumulation, seed)
        assert count, "no step was interrupted"
        assert all(torch.equal(one, other) for one, other in zip(straight, found, strict=True))
    assert list(tmp_path.iterdir()) == []


def within_a_step() -> None:
    engine = engine_of("", "memory")
    assert engine.optimizer is not None
    take = engine.optimizer.take_step

    def interrupted(*judge: Any) -> bool:
        signal.raise_signal(signal.SIGINT)
        return take(*judge)

    engine.optimizer.take_step = interrupted  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(KeyboardInterrupt):
        step(engine)
    assert (engine.global_steps, engine.micro_steps, engine.was_step_applied()) == (1, 1, True)


def test_an_interrupt_within_a_step_waits_for_its_end() -> None:
    run_ranks(1, within_a_step)


def within_a_forward(how: str) -> None:
    engine = engine_of("", "memory")
    handle = engine.module[2].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))  # pyright: ignore
    with pytest.raises(KeyboardInterrupt):
        step(engine) if how == "engine" else engine.module(torch.randn(2, WIDTH))
    handle.remove()
    if how == "engine":
        assert saving() is None
    step(engine)
    assert saving() is None, "torch does not call a forward's last hooks after an interrupt"
    engine.destroy()


@pytest.mark.parametrize("how", ["engine", "module"])
def test_an_interrupted_forward_leaves_no_saved_tensor_hooks(how: str) -> None:
    run_ranks(1, within_a_forward, how)


# Critical sections and watches without an engine


def interrupting(times: int, after: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        after()

    return run


def test_an_interrupt_waits_for_the_outermost_critical_section() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), sigint_handler():
        unbroken(lambda: [unbroken(interrupting(1, lambda: done.append("inner")))(), done.append("outer")])()
        done.append("never")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        unbroken(interrupting(2, lambda: done.append("never")))()
    with pytest.raises(KeyboardInterrupt):
        unbroken(interrupting(1, lambda: done.append("again")))()
    assert done == ["again"], "a call that was interrupted twice has left its handler behind"


def test_between_critical_sections_an_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), sigint_handler():
        unbroken(lambda: None)()
        interrupting(1, lambda: pytest.fail("it waited"))()


def test_an_exception_and_an_interrupt_are_both_raised() -> None:
    def fail() -> None:
        raise ValueError("what went wrong")

    with pytest.raises(KeyboardInterrupt) as found, uninterrupted():
        interrupting(1, fail)()
    assert isinstance(found.value.__context__, ValueError)


def test_ignored_and_handled_interrupts_stay_so() -> None:
    seen: list[int] = []
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        unbroken(interrupting(2, lambda: seen.append(0)))()
        assert (seen, signal.getsignal(signal.SIGINT)) == ([0], signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        unbroken(interrupting(1, lambda: seen.append(1)))()
        assert seen == [0, 1, signal.SIGINT]

        def mine(number: int, frame: object) -> None:
            seen.append(-number)

        with sigint_handler():
            signal.signal(signal.SIGINT, mine)
        assert signal.getsignal(signal.SIGINT) is mine, "a handler that was installed within the context was replaced"
    finally:
        signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler])
def test_with_a_handler_a_critical_section_makes_no_system_call(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    former = signal.signal(signal.SIGINT, handler)
    try:
        with sigint_handler(), monkeypatch.context() as patched:
            patched.setattr(shoal.interrupts, "_set_handler", None)
            patched.setattr(shoal.interrupts, "_get_handler", None)
            assert unbroken(lambda: 7)() == 7
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_handler_that_chains_to_the_former_one_works() -> None:
    former = signal.getsignal(signal.SIGINT)
    seen: list[int] = []
    try:
        with sigint_handler():
            before: Any = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, lambda number, frame: [seen.append(number), before(number, frame)])
        for context in (sigint_handler, uninterrupted):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt), context():
                signal.raise_signal(signal.SIGINT)
        assert seen == 4 * [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, former)


def everywhere() -> None:
    source = sigint_handler.__enter__.__code__.co_filename

    def parts() -> None:
        with sigint_handler():
            unbroken(lambda: None)()
            with uninterrupted():
                pass
        unbroken(lambda: None)()

    kept: list[BaseException] = []  # keeps their frames alive, and the objects in them
    for number in range(2000):
        left = number

        def falls(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            frame.f_trace_opcodes = frame.f_code.co_filename in (source, signal.__file__)
            if event == "opcode":
                left -= 1
                if left == -1:
                    signal.raise_signal(signal.SIGINT)
            return falls

        told = False
        sys.settrace(falls)
        try:
            parts()
        except KeyboardInterrupt as error:
            told, _ = True, kept.append(error)
        finally:
            sys.settrace(None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, f"opcode {number}"
        if left >= 0:
            break
        assert told, f"opcode {number}: the interrupt was swallowed"
        with pytest.raises(KeyboardInterrupt), sigint_handler():  # the next handler works
            unbroken(interrupting(1, lambda: None))()
    assert 100 < len(kept) == number


def test_an_interrupt_at_any_line_ends_the_handler_and_is_raised() -> None:
    run_ranks(1, everywhere)  # an exception of a trace function within `except` is for good the context of all that follow


def test_other_threads_do_not_take_part() -> None:
    found: list[object] = []
    with sigint_handler():
        thread = threading.Thread(target=lambda: found.append(unbroken(lambda: 7)()))
        thread.start()
        thread.join()
    assert found == [7]
