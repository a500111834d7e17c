"""Recompute: a block drops its activations after forward, and runs again in backward to have them.

    none        keeps all activations
    selective   keeps the outputs of matrix products, convolutions and attention, and computes the rest again
    full        keeps its inputs alone

Hooks call torch's checkpoint, so that the module, its name and its state dict stay as they are. The recompute draws the
random numbers of the forward, updates no buffer, and appends to a cache of its own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from enum import Enum
from functools import partial
from inspect import signature
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    _checkpoint_without_reentrant_generator as checkpoint_around,  # pyright: ignore[reportPrivateUsage]  no public one fits hooks
)
from torch.utils.checkpoint import _detach_helper  # pyright: ignore[reportPrivateUsage]  as torch's selective checkpoint

from shoal.activation.random_states import TRACKER, AllStates, ReenteredContext
from shoal.log import warn_once
from shoal.tree import tensors_within

__all__ = ["RecomputeMode", "input_bytes", "is_kept", "kept_bytes", "recompute_blocks"]


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


_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Arguments by which a block of Transformers gets a cache of keys and values, which it appends to."""


class _Block:
    """The hooks of a block, which stay on the module; without recompute they do nothing."""

    def __init__(self, module: nn.Module):
        self.recompute = RecomputeMode.NONE
        """The activations that the block computes again, from its next forward on."""
        self.kept = 0
        """Bytes of outputs that the last forward kept with selective recompute."""
        self.input_bytes = 0
        """Bytes of the first tensor among the arguments of the last forward."""
        self._names = tuple(signature(module.forward).parameters)
        self._recomputes = False
        self._forward: Generator[None] | None = None
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, prepend=True, always_call=True)

    def __reduce__(self) -> tuple[type[_Block], tuple[nn.Module]]:
        """Let a deep copy of the module, or a pickled one, have hooks that do nothing."""
        return _Block, (nn.Module(),)

    def _before(self, module: nn.Module, args: tuple[Any, ...],
                kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._recomputes:
            return self._with_own_cache(args, kwargs)  # those given may serve another recompute
        self.input_bytes = next((each.nbytes for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), 0)
        if self.recompute is RecomputeMode.NONE or not torch.is_grad_enabled():
            return None
        own_args, own_kwargs = self._with_own_cache(args, kwargs)
        self._forward = checkpoint_around(module, False, partial(self._contexts, module), "default", False, True,
                                          *own_args, **own_kwargs)
        next(self._forward)
        if own_kwargs is kwargs or not module.training:  # a script that generates reads what the block appends
            return None
        warn_once(f"activation_checkpointing: the cache of a model in training lacks what a {type(module).__name__} that "
                  f"recomputes appends. Give the model use_cache=False: training needs no cache")
        return self._with_own_cache(args, kwargs)

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        forward, self._forward = self._forward, None
        if forward is not None:
            next(forward, None)

    def _with_own_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with copies of their caches, the same `kwargs` where there is none."""
        named = dict(zip(self._names, args, strict=False)) | kwargs
        if all(named.get(name) is None for name in _CACHES):
            return args, kwargs
        return ((*map(_own_cache, self._names, args), *args[len(self._names):]),
                {name: _own_cache(name, value) for name, value in kwargs.items()})

    def _contexts(self, module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a forward and of its recomputes: each backward through a kept graph has its own."""
        states = AllStates.of(TRACKER)
        outputs = _Outputs() if self.recompute is RecomputeMode.SELECTIVE else None
        return self._forward_keeping(outputs), ReenteredContext(partial(self._recompute, module, states, outputs))

    @contextmanager
    def _forward_keeping(self, outputs: _Outputs | None) -> Generator[None]:
        if outputs is None:
            yield
            return
        with _Keep(outputs):
            yield
        self.kept = outputs.drop_overwritten()

    @contextmanager
    def _recompute(self, module: nn.Module, states: AllStates, outputs: _Outputs | None) -> Generator[None]:
        self._recomputes = True
        try:
            with states.replayed(TRACKER), _buffers_apart(module), nullcontext() if outputs is None else _Take(outputs):
                yield
        finally:
            self._recomputes = False


def _own_cache(name: str, value: Any) -> Any:
    """Return a copy of a cache, which shares the tensors that the cache holds now; other arguments as they are."""
    return deepcopy(value, {id(tensor): tensor for tensor in tensors_within(value)}) if name in _CACHES else value


@contextmanager
def _buffers_apart(module: nn.Module) -> Generator[None]:
    """Within the context the module updates copies of its buffers: the forward has updated the buffers themselves."""
    buffers = [(each, name, buffer) for each in module.modules()
               for name, buffer in each.named_buffers(recurse=False, remove_duplicate=False)]
    for each, name, buffer in buffers:
        setattr(each, name, buffer.detach().clone())
    try:
        yield
    finally:
        for each, name, buffer in buffers:
            setattr(each, name, buffer)


class _Outputs:
    """The outputs that the forward of a block keeps for its recompute, in the order of the calls.

    The recompute takes each of them out. One that was taken, or written to in place, it computes again.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, list[tuple[Tensor, int]]]] = {}

    def keep(self, call: int, output: Any) -> None:
        """Keep what a call returned."""
        output = tree_map(_detach_helper, output)  # shares memory and version
        self._kept[call] = output, [(each, each._version) for each in tensors_within(output)]

    def drop_overwritten(self) -> int:
        """Forget the outputs that were written to in place; return the bytes of the others."""
        for call in [call for call in self._kept if self._is_overwritten(call)]:
            del self._kept[call]
        return sum(each.numel() * each.element_size() for _, versions in self._kept.values() for each, _ in versions)

    def take(self, call: int) -> Any:
        """Return the output of a call; None where it is to be computed again."""
        if call not in self._kept or self._is_overwritten(call):
            return None
        return self._kept.pop(call)[0]

    def _is_overwritten(self, call: int) -> bool:
        return any(each._version != version for each, version in self._kept[call][1])


def is_kept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether selective recompute keeps what a call returns.

    Attention that drops probabilities runs again: without it the random numbers of what follows would be others.
    """
    if func not in _KEPT:
        return False
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return not named.get("dropout_p")


class _SelectiveMode(TorchDispatchMode):
    """Counts the calls whose outputs are kept: those of a forward and of its recompute have the same numbers."""

    def __init__(self, outputs: _Outputs):
        super().__init__()
        self._outputs, self._calls = outputs, count()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See a compiled function as one operator, as torch's selective checkpoint does."""
        return True


class _Keep(_SelectiveMode):
    """Keeps the outputs of products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if is_kept(func, args, kwargs or {}):
            self._outputs.keep(next(self._calls), output)
        return output


class _Take(_SelectiveMode):
    """Takes the outputs of products that the forward kept, and computes the others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = self._outputs.take(next(self._calls)) if is_kept(func, args, kwargs or {}) else None
        return func(*args, **(kwargs or {})) if output is None else output


_blocks: WeakKeyDictionary[nn.Module, _Block] = WeakKeyDictionary()
"""The blocks of this process that have hooks."""


def recompute_blocks(modules: Iterable[nn.Module], recompute: RecomputeMode) -> None:
    """Have each of `modules` recompute its activations as asked, from its next forward on."""
    for module in modules:
        if module not in _blocks:
            _blocks[module] = _Block(module)
        _blocks[module].recompute = recompute


def kept_bytes(module: nn.Module) -> int:
    """Return the bytes of outputs that the last forward of a block with selective recompute kept."""
    return _blocks[module].kept if module in _blocks else 0


def input_bytes(module: nn.Module) -> int:
    """Return the bytes of the first tensor among the arguments of a block's last forward."""
    return _blocks[module].input_bytes if module in _blocks else 0
