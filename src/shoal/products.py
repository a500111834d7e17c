"""The three matrix products of a linear layer, each by torch or by oneDNN.

    forward           y  = x W^T + b
    input gradient    gx = g W
    weight gradient   gW = g^T x

torch computes an fp32 product on the host by the BLAS that it was built with (MKL). oneDNN, which torch brings too, is
faster on many processors, AMD's above all; torch itself calls it for 16-bit dtypes alone. A `Products` says who computes
which product. Both sum in fp32, in another order: results differ by rounding. Small products, other dtypes and other
devices are torch's in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import ConfigError

__all__ = ["ONEDNN", "TORCH", "Kernel", "Products", "check_onednn", "in_autocast_dtype", "onednn_missing",
           "onednn_product", "onednn_weight_gradient"]

Kernel = Literal["torch", "onednn"]

_SMALLEST = 1 << 20
"""Multiplications from which oneDNN's call pays: below, its 10 microseconds of setup outweigh the product."""
_SMALLEST_WEIGHT_GRADIENT, _FEWEST_ROWS = 1 << 23, 64
"""Likewise for the weight gradient, which copies its operands (35 microseconds); with few rows it fell to a slow path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The kernel of each product of fp32 tensors in host memory."""

    forward: Kernel
    input_gradient: Kernel
    weight_gradient: Kernel

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + b: (..., out) of `x` (..., in), `weight` (out, in) and `bias` (out,)."""
        if self.forward == "onednn" and _worth(x, weight, _SMALLEST):
            return onednn_product(x, weight, bias)
        return F.linear(x, weight, bias)

    def gradient_of_input(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return g W: (..., in) of `gradient` (..., out) and `weight` (out, in)."""
        if self.input_gradient == "onednn" and _worth(gradient, weight, _SMALLEST):
            return onednn_product(gradient, weight.t(), None)
        return gradient @ weight

    def gradient_of_weight(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return g^T x: (out, in) of `gradient` (..., out) and `x` (..., in), summed over all but the last dim."""
        gradient, x = _rows(gradient), _rows(x)
        if (self.weight_gradient == "onednn" and gradient.shape[0] >= _FEWEST_ROWS
                and _worth(gradient, x.t(), _SMALLEST_WEIGHT_GRADIENT)):
            return onednn_weight_gradient(gradient, x)
        return gradient.t() @ x


TORCH = Products(forward="torch", input_gradient="torch", weight_gradient="torch")
ONEDNN = Products(forward="onednn", input_gradient="onednn", weight_gradient="onednn")


def onednn_missing() -> str | None:
    """Return why oneDNN's products cannot be called here; None if they can."""
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN"
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch, "mkldnn_linear_backward_weights")):
        return f"torch {torch.__version__} does not offer its products"
    return None


def in_autocast_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands of a product in the dtype of autocast, where that is on, as torch casts those of `F.linear`."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def check_onednn(key: str) -> None:
    """Raise ConfigError for `key` where oneDNN's products cannot be called."""
    if (missing := onednn_missing()) is not None:
        raise ConfigError(f"{key}: got 'onednn', and {missing}; choose 'auto' or 'torch'")


def _rows(tensor: Tensor) -> Tensor:
    """View (..., n) as rows of n."""
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.unsqueeze(0)


def _worth(x: Tensor, weight: Tensor, smallest: int) -> bool:
    """Whether oneDNN may compute this product, and the product is large enough for it."""
    return (x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
            and x.numel() * weight.shape[0] >= smallest and torch.backends.mkldnn.enabled
            and x.layout == weight.layout == torch.strided)


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b by oneDNN."""
    operator = cast(Any, torch.ops.mkldnn)._linear_pointwise
    return operator(x, weight, bias, "none", [], "")


def onednn_weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Return g^T x; the operator takes the weight for its shape alone, which `x` and `gradient` have too."""
    product = cast(Any, torch).mkldnn_linear_backward_weights
    shape = x.new_empty(()).expand(gradient.shape[1], x.shape[1])
    return product(gradient.to_mkldnn(), x.to_mkldnn(), shape, False)[0].to_dense()
