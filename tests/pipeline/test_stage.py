"""A stage runs its layers in order on values of any kind, and recomputes activations in groups."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.activation.checkpointing import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from shoal.errors import UsageError
from shoal.pipeline.layer import LayerSpec, TiedLayerSpec, Unpacked, named
from shoal.pipeline.stage import PipelineStage, Recompute

from .models import WIDTH, Block


def stage(layers: Any, recompute: Recompute | None = None) -> PipelineStage:
    made = PipelineStage(1, [layer.build() for layer in named(layers)])
    if recompute is not None:
        made.set_recompute(recompute)
    return made


class Attending(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask


def test_a_layer_receives_the_return_value_of_the_one_before() -> None:
    seen: list[Any] = []
    values = [torch.ones(1), (torch.ones(1), None), {"x": 3}, [1], "text"]
    for value in values:
        assert stage([seen.append, lambda value: value, seen.append])(value) is None
    assert [value for value in seen if value is not None] == values


def test_an_unpacked_layer_receives_the_parts() -> None:
    x, mask = torch.full((2,), 3.0), torch.tensor([1.0, 0.0])
    attend = stage([Unpacked(LayerSpec(Attending))])
    for value in ((x, mask), [x, mask], {"x": x, "mask": mask}, {"mask": mask, "x": x}):
        assert attend(value).tolist() == [3, 0]
    assert attend((x,)).tolist() == [3, 3]
    tied = stage([Unpacked(TiedLayerSpec("w", nn.Linear, 2, 2, forward_fn=lambda module, a, b: (module, a, b)))])
    assert tied((1, 2))[1:] == (1, 2)
    with pytest.raises(UsageError, match=r"layer '0' \(Attending\) is Unpacked and got a Tensor") as caught:
        attend(x)
    assert caught.value.__notes__ == ["in layer '0' (Attending) of pipeline stage 1"]


def test_a_tied_layer_is_called_through_its_forward_fn() -> None:
    head = stage([TiedLayerSpec("w", nn.Embedding, 5, 3, forward_fn=lambda module, x: x @ module.weight.t())])
    assert head(torch.ones(2, 3)).shape == (2, 5)


def trained(recompute: Recompute) -> tuple[list[Tensor], list[int]]:
    torch.manual_seed(0)
    layers = [*(LayerSpec(Block, number) for number in range(3)), torch.sin, LayerSpec(nn.LayerNorm, WIDTH),
              LayerSpec(Block, 3), LayerSpec(Block, 4)]
    made = stage(layers, recompute)
    Block.runs.clear()
    out = made(torch.randn(2, WIDTH))
    out.sum().backward()
    return [p.grad for p in made.parameters() if p.grad is not None], Block.runs.copy()


@pytest.mark.parametrize(("recompute", "rerun"), [
    (Recompute(), []),
    (Recompute(interval=1), [4, 3, 2, 1, 0]),
    (Recompute(interval=2), [4, 3, 2, 0, 1]),
    (Recompute(interval=9), [0, 1, 2, 3, 4]),
    (Recompute(interval=2, kinds=["Block"]), [3, 4, 2, 0, 1]),
    (Recompute(interval=2, kinds=["LayerNorm"]), []),
])  # fmt: skip
def test_recompute_reruns_groups_and_keeps_the_gradients(recompute: Recompute, rerun: list[int]) -> None:
    wanted, _ = trained(Recompute())
    found, runs = trained(recompute)
    assert runs == [0, 1, 2, 3, 4, *rerun]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_recomputed_group_counts_its_statistics_once() -> None:
    x = torch.randn(6, WIDTH)
    counted: list[Any] = []
    for interval in (0, 2):
        torch.manual_seed(0)
        made = stage([nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()], Recompute(interval=interval))
        made(x).sum().backward()
        counted.append(made.state_dict())
    assert all(map(torch.equal, counted[0].values(), counted[1].values()))


class _Draws(nn.Module):
    """Draws from the named random state and from Python's, and reads a buffer that it updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with get_cuda_rng_tracker().fork():
            hidden = nn.functional.dropout(self.linear(x) * random.random(), 0.5)
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return (hidden - self.mean).tanh()


def test_a_recomputed_group_has_the_states_and_buffers_of_its_forward() -> None:
    found: list[list[Tensor]] = []
    for interval in (0, 2):
        torch.manual_seed(0)
        random.seed(0)
        model_parallel_cuda_manual_seed(7)
        made = stage([_Draws(), _Draws()], Recompute(interval=interval))
        made(torch.randn(6, WIDTH)).sum().backward()
        found.append([parameter.grad for parameter in made.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *found))


def test_a_custom_checkpoint_receives_the_parts_of_a_tuple() -> None:
    """The re-entrant checkpoint finds only tensors that are arguments."""
    linear = nn.Linear(3, 3)
    seen: list[tuple[Any, ...]] = []

    def custom(run: Any, *args: Any) -> Any:
        seen.append(args)
        return checkpoint(run, *args, use_reentrant=True)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self.inner(pair[0]), pair[1]

    both = stage([Both(), Both()], Recompute(interval=1, function=custom))
    x, y = torch.ones(1, 3, requires_grad=True), torch.full((1, 3), 2.0)
    out = both((x, y))
    assert [len(args) for args in seen] == [2, 2]
    (out[0] * out[1]).sum().backward()
    wanted, = torch.autograd.grad((linear(linear(x)) * y).sum(), x)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted)


def test_no_recompute_without_gradients() -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError

    made = stage([LayerSpec(Block, 0)], Recompute(interval=1, function=fail))
    with torch.no_grad():
        assert made(torch.ones(1, WIDTH)).shape == (1, WIDTH)


def test_an_error_names_the_layer_and_the_stage() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        stage({"a": nn.Linear(2, 3), "b": nn.Linear(4, 1)})(torch.ones(1, 2))
    assert caught.value.__notes__ == ["in layer 'b' (Linear) of pipeline stage 1"]
