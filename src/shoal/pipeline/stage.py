"""A stage is a contiguous run of layers on one rank; each layer receives the return value of the one before it.

It is a Sequential of the layers that are modules, so that ZeRO recognises repeated layers as the blocks of the model. With
recomputation, the activations within a group of layers are dropped after forward and computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.activation.replay import replayed
from shoal.errors import UsageError
from shoal.pipeline.layer import Built

__all__ = ["PipelineStage", "Recompute"]

_IN_PLACE_ERROR = "a leaf Variable that requires grad is being used in an in-place operation"
"""Part of autograd's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The settings of activation recomputation (checkpointing)."""

    interval: int = 0
    """Layers per group; 0: no recomputation."""
    function: Callable[..., Any] | None = None
    """Called with a function and its arguments; None: torch's non-reentrant checkpoint."""
    kinds: Collection[str] | None = None
    """Class names of the layers that may be recomputed; None: all."""

    def __call__(self, modules: Sequence[nn.Module], run: Callable[..., Any], *args: Any) -> Any:
        """Return `run(*args)`, which runs `modules`; the recompute updates copies of their buffers."""
        if self.function is not None:
            return self.function(run, *args)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False,
                          context_fn=partial(replayed, "a group of layers", modules))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    layers: tuple[Built, ...]
    recomputed: bool

    @property
    def modules(self) -> list[nn.Module]:
        return [layer.module for layer in self.layers if layer.module is not None]


class PipelineStage(nn.Sequential):
    """Stage `number` of the pipeline, made of layers that are built on this rank."""

    def __init__(self, number: int, layers: Sequence[Built]):
        super().__init__()
        self.number = number
        self.layers = tuple(layers)
        for layer in layers:
            if layer.module is not None:
                self.add_module(str(layer.index), layer.module)
        self.set_recompute(Recompute())

    def set_recompute(self, recompute: Recompute) -> None:
        """Apply `recompute` from the next forward on."""
        self._recompute = recompute
        self._groups = tuple(_groups(self.layers, recompute))

    def forward(self, input: Any) -> Any:
        """Run the layers in order."""
        value = input
        for group in self._groups:
            if not (group.recomputed and torch.is_grad_enabled()):
                value = self._run(group.layers, value)
            elif type(value) is tuple:  # re-entrant checkpoints find only tensors that are arguments
                value = self._recompute(group.modules, partial(self._run_parts, group.layers), *value)
            else:
                value = self._recompute(group.modules, partial(self._run, group.layers), value)
        return value

    def _run_parts(self, layers: Sequence[Built], *values: Any) -> Any:
        return self._run(layers, values)

    def _run(self, layers: Sequence[Built], value: Any) -> Any:
        for layer in layers:
            try:
                value = layer(value)
            except Exception as error:
                if _IN_PLACE_ERROR in str(error):
                    raise UsageError(f"layer '{layer.name}' ({layer.kind}) changes its input in place, and that input came "
                                     f"from another stage, which needs its gradient: give the layer inplace=False, or "
                                     f"let it change a copy") from error
                error.add_note(f"in layer '{layer.name}' ({layer.kind}) of pipeline stage {self.number}")
                raise
        return value


def _groups(layers: Sequence[Built], recompute: Recompute) -> list[_Group]:
    if recompute.interval == 0:
        return [_Group(layers=tuple(layers), recomputed=False)]
    groups: list[_Group] = []
    for allowed, run in groupby(layers, lambda layer: recompute.kinds is None or layer.kind in recompute.kinds):
        run = tuple(run)
        size = recompute.interval if allowed else len(run)
        for start in range(0, len(run), size):
            part = run[start:start + size]
            has_parameters = any(True for layer in part if layer.module is not None for _ in layer.module.parameters())
            groups.append(_Group(layers=part, recomputed=allowed and has_parameters))
    return groups
