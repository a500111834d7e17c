"""Output heads that return the loss where they are given targets, and logits where they are not.

A head takes the parameters of an `nn.Linear` or of a `VocabularyHead`, under their names: state dicts and tying stay. The
loss is computed in the head's own forward, so that hooks of the module (ZeRO's gathering of its weights) surround it.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import UsageError
from shoal.nn.probe import Choice, choose
from shoal.nn.tiled_loss import TiledLoss, WordSlice, tiled_cross_entropy
from shoal.products import Products
from shoal.tensor_parallel import VocabularyHead

__all__ = ["TiledHead", "TiledVocabularyHead", "tiled_head"]


class TiledHead(nn.Linear):
    """A linear layer to the logits of all words: `head(hidden)`; or to the loss: `head(hidden, targets)`."""

    _loss: TiledLoss
    _kernels: Choice

    def __init__(self, in_features: int, out_features: int, bias: bool = False, *, loss: TiledLoss | None = None,
                 kernels: Choice = "auto", device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.set_loss(loss or TiledLoss(), kernels)

    def set_loss(self, loss: TiledLoss, kernels: Choice = "auto") -> None:
        """Take the loss as `loss` says from the next forward on."""
        self._loss, self._kernels = loss, kernels

    def forward(self, input: Tensor, targets: Tensor | None = None, *,  # pyright: ignore[reportIncompatibleMethodOverride]
                loss: TiledLoss | None = None, hand_on: bool = False) -> Tensor:
        """Return logits (..., words) of `input` (..., in), or the loss where there are `targets` (...).

        `hand_on` returns the input itself, for a caller that asks for the loss later.
        """
        if hand_on:
            return input
        if targets is None:
            return F.linear(input, self.weight, self.bias)
        return tiled_cross_entropy(input, self.weight, targets, self.bias, loss=loss or self._loss,
                                   products=_products(self._kernels, input))


class TiledVocabularyHead(VocabularyHead):
    """A head with its words sliced over tensor ranks: `head(hidden)` gives scores, `head(hidden, targets)` the loss."""

    _loss: TiledLoss = TiledLoss()
    _kernels: Choice = "auto"

    def set_loss(self, loss: TiledLoss, kernels: Choice = "auto") -> None:
        """Take the loss as `loss` says from the next forward on."""
        self._loss, self._kernels = loss, kernels

    def forward(self, x: Tensor, targets: Tensor | None = None, *, loss: TiledLoss | None = None,
                hand_on: bool = False) -> Tensor:
        """Return scores as `VocabularyHead` does, or the loss, the same on every rank; `targets` are whole."""
        if hand_on:
            return x
        if targets is None:
            return super().forward(x)
        weight, bias = self.own_words()
        words = WordSlice(words=self.out_features, axis=self.axis, sequence_dim=self.sequence_dim)
        return tiled_cross_entropy(x, weight, targets, bias, loss=loss or self._loss, words=words,
                                   products=_products(self._kernels, x))


def tiled_head(head: nn.Module, *, loss: TiledLoss | None = None, kernels: Choice = "auto",
               ) -> TiledHead | TiledVocabularyHead:
    """Return a head with the parameters of `head`, an `nn.Linear` or a `VocabularyHead`, that takes targets.

    Raises UsageError for other modules.
    """
    if isinstance(head, VocabularyHead):
        sliced = TiledVocabularyHead.__new__(TiledVocabularyHead)
        nn.Module.__init__(sliced)
        vars(sliced).update(vars(head))
        sliced.set_loss(loss or TiledLoss(), kernels)
        return sliced
    if type(head) is not nn.Linear:
        raise UsageError(f"tiled_head: got a {type(head).__module__}.{type(head).__name__}; give a torch.nn.Linear or a "
                         f"shoal.tensor_parallel.VocabularyHead, or call shoal.nn.tiled_cross_entropy in the module's own "
                         f"forward")
    tiled = TiledHead.__new__(TiledHead)
    nn.Module.__init__(tiled)
    vars(tiled).update({name: copy(value) if isinstance(value, dict) else value for name, value in vars(head).items()})
    vars(tiled).pop("forward", None)  # that of `set_linear_kernels`: `kernels` says who computes the products
    tiled.set_loss(loss or TiledLoss(), kernels)
    return tiled


def _products(kernels: Choice, tensor: Tensor) -> Products:
    return choose(kernels, tensor.device)
