"""The reference computes where operators are recorded or transformed: with every mask, what it computes elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoal.attention import DenseSparsityConfig, attend

BLOCKS = DenseSparsityConfig(2, 16).blocks(64)
SEEN = torch.arange(64).remainder(5) > 0
SCORES = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
OPTIONS = {
    "key padding": {"key_padding": SEEN[None]},
    "whole numbers": {"mask": (SCORES > 0).long(), "mask_mode": "mul"},
    "an added mask": {"mask": SCORES},
    "a bias": {"bias": SCORES},
    "dropout": {"dropout": 0.25, "seed": 3},
}


def compiled(f: Callable[[Tensor], Tensor], query: Tensor) -> Tensor:
    return torch.compile(f, backend="aot_eager", fullgraph=True)(query)


def of_any_batch(f: Callable[[Tensor], Tensor], query: Tensor) -> Tensor:
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]  graphs of one function are limited in number
    return torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)(query)


def exported(f: Callable[[Tensor], Tensor], query: Tensor) -> Tensor:
    class Module(nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            return f(query)

    return torch.export.export(Module(), (query,)).module()(query)


def mapped(f: Callable[[Tensor], Tensor], query: Tensor) -> Tensor:
    return torch.func.vmap(f)(torch.stack([query, 2 * query]))[0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("way", [compiled, of_any_batch, exported, mapped])
def test_the_reference_computes_in_traces(way: Callable[..., Tensor], options: dict[str, object]) -> None:
    query = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))

    def f(query: Tensor) -> Tensor:
        return attend(query, query, query, BLOCKS, backend="reference", **options)  # pyright: ignore[reportArgumentType]

    torch.testing.assert_close(way(f, query), f(query))
