"""Steps that backward attempts: when it does, what it saves, what undoes them, and what they leave then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.engine import storage_plan
from shoal.errors import TierError, UsageError
from shoal.testing import run_ranks

WIDTH, LAYERS = 256, 6
DISK: dict[str, Any] = {"device": "nvme", "buffer_count": 2}


class Stack(nn.Sequential):
    """Layers, one of which may be left out."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.left_out: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self):
            if number != self.left_out:
                x = torch.tanh(layer(x))
        return x


def engine_of(folder: str, *, model: nn.Module | None = None, **more: Any) -> shoal.Engine:
    zero = {"stage": 3, "offload_param": {**DISK, "nvme_path": folder},
            "offload_optimizer": {**DISK, "nvme_path": folder, "step_in_backward": True},
            "ignore_unused_parameters": more.pop("ignore_unused_parameters", True)}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1e6, "timeout": 20, "zero_optimization": zero,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **more}
    return shoal.initialize(model=model or Stack(), config=config)[0]


def backward(engine: shoal.Engine, *, size: float = 1.0) -> list[bool]:
    """Run a pass whose gradients are as large as `size`; return which units it has begun to step."""
    torch.manual_seed(1)
    engine.backward(size * engine(torch.randn(2, WIDTH)).pow(2).mean())
    assert engine.sharded is not None
    return [unit.stepped for unit in engine.sharded.trainable]


def weights(engine: shoal.Engine) -> list[Tensor]:
    with shoal.gathered(engine.module):
        return [parameter.detach().clone() for parameter in engine.module.parameters()]


def begins(folder: str) -> None:
    engine = engine_of(folder)
    for size, attempted in ((1.0, False), (1.0, True), (1e9, True), (1.0, False), (1.0, False), (1e9, True), (1e9, False),
                            (1.0, False), (1.0, False), (1.0, False), (1.0, False), (1.0, True), (1.0, True), (1.0, True)):
        assert backward(engine, size=size) == [attempted] * LAYERS, "after steps that were not clipped, one, two, four"
        engine.step()
        assert engine.sharded is not None and not any(unit.stepped for unit in engine.sharded.trainable)
    engine.destroy()


def test_a_step_is_attempted_after_some_that_were_not_clipped(tmp_path: Path) -> None:
    run_ranks(2, begins, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def moved(folder: str) -> tuple[float, float]:
    """Return the bytes that an attempted step reads and writes for each element."""
    engine = engine_of(folder)
    assert engine.sharded is not None and engine.optimizer is not None
    swap = engine.sharded.residence.swaps[0]

    def count() -> tuple[int, int]:
        engine.optimizer.settle()
        with swap.lock:
            assert swap.changed.wait_for(lambda: not swap.writing_bytes, 20)
        return swap.read_bytes, swap.written_bytes

    for _ in range(2):
        backward(engine)
        engine.step()
    before = count()
    for _ in range(4):
        assert all(backward(engine))
        engine.step()
        after = count()
    elements = sum(unit.layout.size for unit in engine.sharded.units)
    engine.destroy()
    return tuple((new - old) / 4 / elements for new, old in zip(after, before, strict=True))


def test_an_attempt_writes_the_gradient_and_does_not_read_it(tmp_path: Path) -> None:
    read, written = run_ranks(1, moved, str(tmp_path))[0]
    assert read <= 16, "weights twice and two moments, less what a pass leaves the next"
    assert abs(written - 16) <= 1.5, "weights, two moments and the gradient"


def refused(folder: str) -> tuple[list[Tensor], list[Tensor], str]:
    """Return the weights before a step that is refused when backward has attempted it, those after, and what was said."""
    engine = engine_of(folder, ignore_unused_parameters=False)
    backward(engine)
    engine.step()
    before = weights(engine)
    assert isinstance(engine.module, Stack)
    engine.module.left_out = 2
    assert sum(backward(engine)) >= LAYERS - 2
    with pytest.raises(UsageError) as raised:
        engine.step()
    after = weights(engine)
    engine.module.left_out = None
    assert not any(backward(engine)), "which was no calm step"
    engine.step()
    engine.destroy()
    return before, after, str(raised.value)


def test_a_step_that_is_refused_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    before, after, said = run_ranks(1, refused, str(tmp_path))[0]
    assert all(map(torch.equal, before, after))
    assert "2.weight" in said and "The weights are as before this step" in said


def unfinished(folder: str) -> tuple[list[Tensor], list[Tensor]]:
    engine = engine_of(folder)
    backward(engine)
    engine.step()
    before = weights(engine)
    assert all(backward(engine, size=1e9))
    engine.destroy()
    return before, [parameter.detach().clone() for parameter in engine.module.parameters()]


def test_an_engine_that_is_destroyed_before_step_leaves_no_attempt(tmp_path: Path) -> None:
    before, after = run_ranks(1, unfinished, str(tmp_path))[0]
    assert all(map(torch.equal, before, after))
    assert list(tmp_path.iterdir()) == []


def harmed(folder: str) -> str:
    """Return what is said by an engine whose file is cut short between an attempt and the step that undoes it."""
    engine = engine_of(folder)
    backward(engine)
    engine.step()
    assert all(backward(engine, size=1e9))
    assert engine.optimizer is not None
    engine.optimizer.settle()
    os.truncate(next(Path(folder).glob("shoal-swap-*/*.swap")), 0)
    said = []
    for action in (engine.step, lambda: backward(engine), lambda: engine.save_checkpoint(f"{folder}/saved")):
        with pytest.raises(TierError) as raised:
            action()
            assert engine.optimizer is not None
            engine.optimizer.settle()
        said.append(str(raised.value))
    assert all("load a checkpoint" in text for text in said[1:])
    return said[0]


def test_what_cannot_be_read_back_ends_the_engine(tmp_path: Path) -> None:
    said = run_ranks(1, harmed, str(tmp_path))[0]
    assert "rank 0" in said and "unit '" in said and ".swap" in said


def needs(folder: str) -> str:
    storage_plan.free_bytes = lambda path: 0
    with pytest.raises(TierError) as raised:
        engine_of(folder)
    return str(raised.value)


def test_both_places_of_what_is_attempted_are_asked_for_before_training(tmp_path: Path) -> None:
    """Weights and two moments twice, the gradient once: 28 bytes of each element."""
    said = run_ranks(1, needs, str(tmp_path))[0]
    assert f"{28 * LAYERS * WIDTH * WIDTH:,} bytes of state are to rest there" in said


def changed(folder: str | None, when: str, *, size: float) -> list[Tensor]:
    """Train with an option that native code does not take, from `when` on."""
    engine = engine_of(folder) if folder else shoal.initialize(model=Stack(), config={
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1e6, "timeout": 20,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})[0]
    assert engine.optimizer is not None
    for number in range(4):
        backward(engine, size=size if number == 2 else 1.0)
        if (number, when) == (2, "between"):
            engine.optimizer.param_groups[0]["maximize"] = True
        engine.step()
        if (number, when) == (2, "after"):
            engine.optimizer.param_groups[0]["maximize"] = True
    found = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("size", [1.0, 1e9])
def test_an_option_that_changes_after_a_step_was_decided_on_is_none_of_it(size: float, tmp_path: Path) -> None:
    """Between backward and step it is this step's, attempted or not; after a step the next one's."""
    for when in ("after", "between"):
        attempted, plain = (run_ranks(1, changed, folder, when, size=size)[0] for folder in (str(tmp_path), None))
        assert all(map(torch.equal, attempted, plain)), when


class Interrupted(Stack):
    """Raises in the middle of one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self):
            x = torch.tanh(layer(x))
            if number == 2 and self.raises:
                x.register_hook(self._fail)
        return x

    def _fail(self, gradient: Tensor) -> None:
        raise RuntimeError("the middle of backward")


def goes_on(folder: str, raises: bool) -> list[Tensor]:
    """Train; where a backward `raises` when it has attempted some steps, forget its gradients, and run it again."""
    engine = engine_of(folder, model=Interrupted())
    for number in range(4):
        if raises and number == 2:
            engine.module.raises = True
            with pytest.raises(RuntimeError, match="the middle of backward"):
                backward(engine)
            engine.module.raises = False
            engine.zero_grad()
        backward(engine)
        engine.step()
    found = weights(engine)
    engine.destroy()
    return found


def test_an_exception_in_backward_undoes_what_was_attempted_and_training_goes_on(tmp_path: Path) -> None:
    plain, found = (run_ranks(1, goes_on, str(tmp_path), raises)[0] for raises in (False, True))
    assert all(map(torch.equal, found, plain))
    assert list(tmp_path.iterdir()) == []
