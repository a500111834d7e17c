"""A probe that runs at the first call of a layer is as one that runs outside of the training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.autograd import isolated

HOST = torch.device("cpu")


def _probe() -> torch.dtype:
    with isolated(HOST):
        a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        product = (a @ b).exp()
        assert all(each.isfinite().all() for each in torch.autograd.grad(product.sum(), (a, b)))
        return product.dtype


def _keep_products(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("options", [{}, {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)}],
                         ids=["full", "selective"])
def test_a_probe_within_a_checkpoint_leaves_its_recompute_alone(options: dict[str, Any]) -> None:
    probed: list[bool] = []

    def block(x: Tensor, weight: Tensor, probe: Callable[[], object]) -> Tensor:
        if not probed:  # as a cached one, which recompute does not repeat
            probed.append(True)
            probe()
        return (x @ weight).exp()

    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad((x @ weight).exp().sum(), (x, weight))
    found = torch.autograd.grad(checkpoint(block, x, weight, _probe, use_reentrant=False, **options).sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_probe_computes_in_its_own_dtype_and_has_gradients() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _probe() == torch.float32
    with torch.no_grad():
        assert _probe() == torch.float32
    with torch.inference_mode():
        assert _probe() == torch.float32
