"""The linear layer of stage 3 under its published names.

Shoal gathers a weight again in backward by itself, and autograd keeps no copy of it; so these compute as torch does.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LinearModuleForZeroStage3", "zero3_linear_wrap"]


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input @ weight.T + bias`."""
    return functional.linear(input, weight, bias)


class LinearModuleForZeroStage3(nn.Module):
    """A linear layer; it is no `torch.nn.Linear`, as published."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        made = nn.Linear(in_features, out_features, bias)
        self.in_features, self.out_features = in_features, out_features
        self.weight = made.weight
        self.bias: nn.Parameter | None = made.bias if bias else None

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as `torch.nn.Linear` does."""
        nn.Linear.reset_parameters(self)  # pyright: ignore[reportArgumentType]  it reads weight and bias alone

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`."""
        return zero3_linear_wrap(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
