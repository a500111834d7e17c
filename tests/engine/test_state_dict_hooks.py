"""Whole state dicts have the names that the hooks of a model's `state_dict` give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import ReleasedError
from shoal.testing import run_ranks

Hook = Callable[[nn.Module, dict[str, Any], str, Any], None]


def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key in [key for key in state if key.startswith((f"{prefix}inner.", f"{prefix}scale"))]:
        state[f"{prefix}core.{key.removeprefix(prefix)}"] = state.pop(key)


def remove(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del state[f"{prefix}inner.weight"]


def convert(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}inner.weight"] = state[f"{prefix}inner.weight"].double()


class Model(nn.Module):
    """A layer in units of its own, one that is tied to it, and a buffer."""

    def __init__(self, hook: Hook):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.tied = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.tied.weight = self.inner.weight
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.register_state_dict_post_hook(hook)  # pyright: ignore[reportUnknownMemberType]

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.inner(x).tanh()) * self.scale


def trained(stage: int, hook: Hook) -> tuple[Any, dict[str, Any]]:
    """Return an engine after two steps, and the state dict of the same training in plain PyTorch."""
    engine = shoal.initialize(model=Model(hook), config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]
    plain = Model(hook)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        plain(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine, plain.state_dict()


def whole(stage: int, hook: Hook) -> bool:
    """Compare the whole state dict with that of plain PyTorch, and load one of other values."""
    engine, expected = trained(stage, hook)
    state = engine.consolidated_state_dict()
    if engine.global_rank == 0:
        assert state.keys() == expected.keys()
        torch.testing.assert_close(state, expected)
    other = {name: torch.full_like(value, number) for number, (name, value) in enumerate(expected.items())}
    other["tied.weight"] = other.get("core.inner.weight", other["tied.weight"])
    engine.load_module_state_dict(other)
    loaded = engine.consolidated_state_dict()
    if engine.global_rank == 0:
        torch.testing.assert_close(loaded, other)
    with torch.no_grad():
        engine(torch.ones(2, 4))
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    return state is not None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("hook", [rename, remove])
def test_hooks_of_a_state_dict_give_its_names(hook: Hook, stage: int, ranks: int) -> None:
    assert run_ranks(ranks, whole, stage, hook) == [rank == 0 for rank in range(ranks)]


def saved(folder: Path) -> list[float]:
    """Save a model whose buffer is renamed and differs by rank, change the buffer, and load it."""
    engine, _ = trained(2, rename)
    engine.module.scale.fill_(engine.global_rank + 3)
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    engine.module.scale.zero_()
    engine.load_checkpoint(folder)
    return engine.module.scale.tolist()


def test_a_renamed_buffer_is_sent_to_the_ranks_and_saved(tmp_path: Path) -> None:
    assert run_ranks(2, saved, tmp_path) == [[3.0] * 4] * 2


def refused(stage: int) -> list[str]:
    engine, _ = trained(stage, convert)
    with pytest.raises(ReleasedError) as error:
        engine.consolidated_state_dict()
    return error.value.__notes__


def test_a_hook_that_reads_a_released_weight_raises_on_every_rank() -> None:
    for notes in run_ranks(2, refused, 3):
        assert "a hook of the model's state_dict reads a weight" in notes[-1]
