"""Low-rank adapters (Hu et al. 2021): a frozen linear layer W x becomes W x + (alpha / r) B A x, and only A and B learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LoraLinear(nn.Module):
    """A frozen linear layer with adapters of rank `rank`; B begins at zero, so that nothing changes at first."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * (x @ self.down.T @ self.up.T)


def add_adapters(model: nn.Module, rank: int, alpha: float = 16.0) -> None:
    """Freeze `model`, and give every linear layer within a block adapters."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers." in name:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, LoraLinear(module, rank, alpha))


def merged(state: dict[str, Tensor], rank: int, alpha: float = 16.0) -> dict[str, Tensor]:
    """Return the state dict of the model without adapters, which they are added to."""
    plain = {name.replace(".linear.", "."): value for name, value in state.items() if not name.endswith((".down", ".up"))}
    for name, up in state.items():
        if name.endswith(".up"):
            layer = name.removesuffix(".up")
            plain[f"{layer}.weight"] = plain[f"{layer}.weight"] + alpha / rank * up @ state[f"{layer}.down"]
    return plain
