"""Recompute: a block drops its activations after forward, and runs again in backward to have them.

    none        keeps all activations
    selective   keeps the outputs of matrix products, convolutions and attention, and computes the rest again
    full        keeps its inputs alone

Torch's composable checkpoint does it, by hooks: the module, its name and its state dict stay as they are. Random numbers of
the recompute are those of the forward.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["RecomputeMode", "kept_bytes", "recompute_blocks"]


class RecomputeMode(Enum):
    """Which activations of a block are computed again."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "_scaled_dot_product_flash_attention",
             "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
             "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable")
"""Operators of aten whose outputs selective recompute keeps: their time outweighs their bytes."""

_KEPT = frozenset([
    *(getattr(torch.ops.aten, name).default for name in _PRODUCTS if hasattr(torch.ops.aten, name)),
    *([torch.ops.mkldnn._linear_pointwise.default] if hasattr(torch.ops.mkldnn, "_linear_pointwise") else []),
])


class _Block:
    """A block under torch's checkpoint, whose hooks stay on the module; without recompute they do nothing."""

    def __init__(self, module: nn.Module):
        self._module = ref(module)
        self._recompute = RecomputeMode.FULL
        self.kept = 0
        """Bytes of outputs that the last forward kept with selective recompute."""
        checkpoint(module, context_fn=self._contexts)

    def set(self, recompute: RecomputeMode) -> None:
        """Recompute as asked from the next forward on."""
        self._recompute = recompute
        module = self._module()
        assert module is not None
        checkpoint.state(module).enable_hook = recompute is not RecomputeMode.NONE

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if self._recompute is RecomputeMode.SELECTIVE:
            keeping, using = create_selective_checkpoint_contexts(_policy)
            return self._counted(keeping), using
        return nullcontext(), nullcontext()

    @contextmanager
    def _counted(self, keeping: AbstractContextManager[Any]) -> Generator[None]:
        with keeping, _KeptBytes() as found:
            yield
        self.kept = found.bytes


class _KeptBytes(TorchDispatchMode):
    """Counts the bytes of the outputs that selective recompute keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _KEPT:
            outputs = output if isinstance(output, tuple | list) else (output,)
            self.bytes += sum(each.numel() * each.element_size() for each in outputs if isinstance(each, Tensor))
        return output


def _policy(context: object, operator: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_blocks: WeakKeyDictionary[nn.Module, _Block] = WeakKeyDictionary()
"""The blocks of this process that torch's checkpoint has hooks on: it takes a module once."""


def recompute_blocks(modules: Iterable[nn.Module], recompute: RecomputeMode) -> None:
    """Have each of `modules` recompute its activations as asked, from its next forward on."""
    for module in modules:
        if module not in _blocks and recompute is not RecomputeMode.NONE:
            _blocks[module] = _Block(module)
        if module in _blocks:
            _blocks[module].set(recompute)


def kept_bytes(module: nn.Module) -> int:
    """Return the bytes of outputs that the last forward of a block with selective recompute kept."""
    return _blocks[module].kept if module in _blocks else 0
