"""Stages on several ranks with channels between them give the losses and gradients of one process, for any values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.pipeline.channel import Receiver, Sender
from shoal.pipeline.layer import LayerSpec, Unpacked
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.value_tree import flatten_tree
from shoal.testing import run_ranks

from .models import WIDTH, Block, Head, loss_of

MICROBATCHES = 5


class EmbedToDict(nn.Embedding):
    """Returns a dict of tensors with and without gradients, and a number."""

    def forward(self, input: Tensor) -> Any:
        return {"x": super().forward(input), "mask": input > 3, "turn": 0}


class Masked(Block):
    """A block that receives the parts of a dict."""

    def forward(self, x: Tensor, mask: Tensor, turn: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"x": super().forward(x) * (turn + mask[..., None]), "mask": mask, "turn": turn + 1}


def layers() -> list[Any]:
    return [LayerSpec(EmbedToDict, 13, WIDTH), *(Unpacked(LayerSpec(Masked, number)) for number in range(4)),
            lambda value: value["x"], LayerSpec(Head)]


def microbatch(number: int) -> tuple[Tensor, Tensor]:
    """Return words and labels of a length that depends on `number`."""
    chance = torch.Generator().manual_seed(number)
    inputs, labels = (torch.randint(13, (2, 3 + number % 3), generator=chance) for _ in range(2))
    return inputs, labels


def trained(ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Run all forwards, then all backwards."""
    net = PipelineModule(layers(), num_stages=ranks, seed_layers=True, partition_method="uniform", loss_fn=loss_of)
    (stage,), rank = net.stages, dist.get_rank()
    last = rank == ranks - 1
    before, after = channels(rank, ranks)
    saved: list[tuple[Any, Any]] = []
    if rank:
        before[0].expect(MICROBATCHES)
    if not last:
        after[1].expect(MICROBATCHES)
    for number in range(MICROBATCHES):
        inputs, labels = microbatch(number)
        value = before[0].receive() if rank else inputs
        result = stage(value)
        if last:
            result = loss_of(result, labels)
        else:
            after[0].send(result)
        saved.append((value, result))
    for value, result in saved:
        if last:
            result.backward()
        else:
            torch.autograd.backward(requiring_grad(result), after[1].receive())
        if rank:
            before[1].send([tensor.grad for tensor in requiring_grad(value)])
    for end in (*before, *after):
        if isinstance(end, Sender):
            end.flush()
        end.close()
    losses = [result.item() for _, result in saved] if last else []
    return losses, {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def channels(rank: int, ranks: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the channels (activations, gradients) to the rank before, and those to the rank after."""
    group = dist.group.WORLD
    assert group is not None
    ends = {"device": torch.device("cpu"), "timeout": 30.0}
    before = (Receiver(group, rank - 1, 2 * rank, name="activations", **ends),
              Sender(group, rank - 1, 2 * rank + 1, name="gradients", **ends)) if rank else ()
    after = (Sender(group, rank + 1, 2 * rank + 2, name="activations", **ends),
             Receiver(group, rank + 1, 2 * rank + 3, name="gradients", **ends)) if rank < ranks - 1 else ()
    return before, after


def requiring_grad(value: Any) -> list[Tensor]:
    return [tensor for tensor in flatten_tree(value, "")[1] if tensor.requires_grad]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_pipeline_gives_the_losses_and_gradients_of_one_process(ranks: int) -> None:
    (losses, whole), = run_ranks(1, trained, 1)
    found = run_ranks(ranks, trained, ranks)
    assert found[-1][0] == losses
    parts = {name: gradient for _, part in found for name, gradient in part.items()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole), "to the last bit"
