"""Recompute: a block drops its activations after forward, and runs again in backward to have them.

    none        keeps all activations
    selective   keeps the outputs of matrix products, convolutions and attention, and computes the rest again
    full        keeps its inputs alone

Hooks call torch's checkpoint, so that the module, its name and its state dict stay as they are. The recompute draws the
random numbers of the forward, updates no buffer, and appends to a cache of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from inspect import signature
from itertools import count, zip_longest
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    _checkpoint_without_reentrant_generator as checkpoint_around,  # pyright: ignore[reportPrivateUsage]  no public one fits hooks
)

from shoal.activation.random_states import ReenteredContext
from shoal.activation.replay import Replay
from shoal.autograd import KeepsResults, storages
from shoal.errors import UsageError
from shoal.log import warn_once
from shoal.module_hooks import is_compiled
from shoal.tree import tensors_within

__all__ = ["Calls", "RecomputeMode", "begin_pass", "calls_in_pass", "end_interrupted", "is_kept",
           "recompute_blocks"]


P = ParamSpec("P")
T = TypeVar("T")


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


_UNSAFE_VIEWS = frozenset([torch.ops.aten._unsafe_view.default, torch.ops.aten.unsafe_split.Tensor,
                           torch.ops.aten.unsafe_split_with_sizes.default])
"""Operators whose outputs share the memory of their input, but count the writes to them apart."""


_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Arguments by which a block of Transformers gets a cache of keys and values, which it appends to."""


def _outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Let a graph of torch.compile end before `function`, and another begin after it."""
    return cast("Callable[P, T]", torch.compiler.disable(function))


@dataclass(slots=True)
class Calls:
    """The calls of a block in one pass, with the bytes of their inputs: of the first tensor among the arguments of each."""

    count: int = 0
    inputs: int = 0
    """Of all calls."""
    largest: int = 0
    """Of one call."""
    kept: int = 0
    """Bytes of outputs that selective recompute keeps."""

    def add(self, inputs: int) -> None:
        """Count a call."""
        self.count += 1
        self.inputs += inputs
        self.largest = max(self.largest, inputs)


class _Block:
    """The hooks of a block, which stay on the module; without recompute they do nothing."""

    def __init__(self, module: nn.Module):
        self.recompute = RecomputeMode.NONE
        """The activations that the block computes again, from its next forward on."""
        self.calls = Calls()
        """The forwards of this pass that autograd recorded."""
        self._names = tuple(signature(module.forward).parameters)
        self._recomputes = False
        self._forwards: list[tuple[Generator[None], _HeldArguments]] = []
        # Before the hooks of scripts: a recompute calls them again, as torch's checkpoint around the module does.
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after, prepend=True, always_call=True)

    def __reduce__(self) -> tuple[type[_Block], tuple[nn.Module]]:
        """Let a deep copy of the module, or a pickled one, have hooks that do nothing."""
        return _Block, (nn.Module(),)

    def _before(self, module: nn.Module, args: tuple[Any, ...],
                kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling():
            if self._is_plain_in_graph():
                return None
            if not is_compiled(module):
                _refuse_graph(type(module).__name__)
        return self._enter(module, args, kwargs)

    @_outside_graphs
    def _enter(self, module: nn.Module, args: tuple[Any, ...],
               kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._recomputes:
            return self._with_own_cache(args, kwargs)  # those given may serve another recompute
        if not torch.is_grad_enabled():
            return None
        self.calls.add(next((_bytes(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), 0))
        if self.recompute is RecomputeMode.NONE:
            return None
        own_args, own_kwargs = self._with_own_cache(args, kwargs)
        held = _HeldArguments(type(module).__name__, self._names, own_args, own_kwargs)
        forward = checkpoint_around(module, False, partial(self._contexts, module, held), "default", False, True,
                                    *own_args, **own_kwargs)
        self._forwards.append((forward, held))
        _running.append((module, self))
        next(forward)
        if own_kwargs is kwargs or not module.training:  # a script that generates reads what the block appends
            return None
        warn_once(f"activation_checkpointing: the cache of a model in training lacks what a {type(module).__name__} that "
                  f"recomputes appends. Give the model use_cache=False: training needs no cache")
        return self._with_own_cache(args, kwargs)

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        if not (torch.compiler.is_compiling() and self._is_plain_in_graph()):
            self._leave(module)

    def _is_plain_in_graph(self) -> bool:
        """Whether torch.compile or torch.export traces the block as a plain module: nothing is recomputed there."""
        return (self.recompute is RecomputeMode.NONE or not torch.is_grad_enabled()
                or torch.compiler.is_exporting())

    @_outside_graphs
    def _leave(self, module: nn.Module) -> None:
        if self._recomputes:  # a script differentiates within the block: the forward itself goes on
            return
        if self._forwards:
            forward, held = self._forwards.pop()
            _running.remove((module, self))
            held.note()
            next(forward, None)

    def interrupt(self) -> None:
        """End a forward that an interrupt has ended."""
        if self._forwards:
            self._forwards.pop()[0].close()

    def _with_own_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with copies of their caches, the same `kwargs` where there is none."""
        named = dict(zip(self._names, args, strict=False)) | kwargs
        if all(named.get(name) is None for name in _CACHES):
            return args, kwargs
        return ((*map(_own_cache, self._names, args), *args[len(self._names):]),
                {name: _own_cache(name, value) for name, value in kwargs.items()})

    def _contexts(self, module: nn.Module,
                  held: _HeldArguments) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a forward and of its recomputes: each backward through a kept graph has its own."""
        replay = Replay(f"a {type(module).__name__}", [module])
        outputs = _Outputs() if self.recompute is RecomputeMode.SELECTIVE else None
        return self._forward_keeping(replay, outputs), ReenteredContext(partial(self._recompute, replay, outputs, held))

    @contextmanager
    def _forward_keeping(self, replay: Replay, outputs: _Outputs | None) -> Generator[None]:
        with replay.forward(), nullcontext() if outputs is None else _Keep(outputs, lambda: self._recomputes):
            yield
        if outputs is not None:
            self.calls.kept += outputs.drop_overwritten()

    @contextmanager
    def _recompute(self, replay: Replay, outputs: _Outputs | None, held: _HeldArguments) -> Generator[None]:
        held.check()
        self._recomputes = True
        try:
            with replay.recompute(), nullcontext() if outputs is None else _Take(outputs):
                yield
        finally:
            self._recomputes = False


@_outside_graphs
def _refuse_graph(block: str) -> None:
    """Raise `UsageError`: the graph around the block saved other tensors than the block, which runs again by itself."""
    raise UsageError(f"activation_checkpointing: a {block} recomputes its activations within a larger graph of "
                     f"torch.compile; compile the blocks, by engine.compile() or block.compile() for each, or leave "
                     f"recompute and budget out: torch.compile chooses what a graph recomputes")


class _HeldArguments:
    """The tensors among a block's arguments that its checkpoint holds as they are, so that autograd checks no version.

    They are keyword arguments, and tensors within lists, tuples, dicts and caches.
    """

    def __init__(self, block: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._block = block
        positional = ((name, each) for name, each in zip_longest(names[:len(args)], args) if not isinstance(each, Tensor))
        self._held = [(name, ref(tensor), -1) for name, value in (*positional, *kwargs.items())
                      for tensor in tensors_within(value) if not tensor.is_inference()]

    def note(self) -> None:
        """Note the versions at the end of the forward, which may write to its arguments."""
        self._held = [(name, tensor, -1 if (held := tensor()) is None else held._version)
                      for name, tensor, _ in self._held]

    def check(self) -> None:
        """Raise `UsageError` for a tensor that was written to after the forward."""
        for name, reference, version in self._held:
            tensor = reference()
            if tensor is not None and version >= 0 and tensor._version != version:
                raise UsageError(f"activation_checkpointing: argument '{name}' of a {self._block}, of shape "
                                 f"{tuple(tensor.shape)}, was written to in place after the block's forward, so that "
                                 f"backward cannot compute the block again. Give the block a copy (`tensor.clone()`), or "
                                 f"write after backward")


def _own_cache(name: str, value: Any) -> Any:
    """Return a copy of a cache, which shares the tensors that the cache holds now; other arguments as they are."""
    return deepcopy(value, {id(tensor): tensor for tensor in tensors_within(value)}) if name in _CACHES else value


class _Outputs:
    """The outputs that the forward of a block keeps for its recompute, in the order of the calls.

    The recompute takes each of them out. One that was taken, or written to in place, it computes again.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, list[tuple[Tensor, int]]]] = {}
        self._call_of: dict[int, int] = {}
        """The calls by the storages of their outputs, while the forward runs."""

    def keep(self, call: int, output: Any) -> None:
        """Keep what a call returned."""
        output = tree_map(_detached, output)  # shares memory and version
        self._kept[call] = output, [(each, each._version) for each in tensors_within(output)]
        self._call_of.update((storage, call) for each in tensors_within(output) for storage in _identities(each))

    def watch(self, source: Tensor, views: Any) -> None:
        """Note writes to `views` as those to what a call returned, if they share its memory: `source` does."""
        call = next((self._call_of[each] for each in _identities(source) if each in self._call_of), None)
        if call is not None:
            self._kept[call][1].extend((each, each._version) for each in tensors_within(tree_map(_detached, views)))

    def drop_overwritten(self) -> int:
        """Forget the outputs that were written to in place; return the bytes of the others."""
        self._call_of.clear()
        for call in [call for call in self._kept if self._is_overwritten(call)]:
            del self._kept[call]
        return sum(_bytes(each) for output, _ in self._kept.values() for each in tensors_within(output))

    def take(self, call: int) -> Any:
        """Return the output of a call; None where it is to be computed again."""
        if call not in self._kept or self._is_overwritten(call):
            return None
        return self._kept.pop(call)[0]

    def _is_overwritten(self, call: int) -> bool:
        return any(each._version != version for each, version in self._kept[call][1])


def _detached(value: Any) -> Any:
    """Return a tensor apart from its graph, which counts the writes to its memory with it; other values as they are.

    Beneath autograd, where a dispatch mode runs, torch leaves out the key that makes views share that count.
    """
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # pyright: ignore[reportPrivateUsage]
        return value.detach()


def _identities(tensor: Tensor) -> list[int]:
    return [storage._cdata for storage in storages(tensor)]  # pyright: ignore[reportPrivateUsage]  no public name


def _bytes(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else sum(storage.nbytes() for storage in storages(tensor))


def is_kept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether selective recompute keeps what a call returns.

    Attention that drops probabilities runs again: without it the random numbers of what follows would be others.
    """
    if func not in _KEPT:
        return False
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return not named.get("dropout_p")


class _SelectiveMode(KeepsResults):
    """Counts the calls whose outputs are kept: those of a forward and of its recompute have the same numbers."""

    def __init__(self, outputs: _Outputs):
        super().__init__()
        self._outputs, self._calls = outputs, count()
        self._in_kernel = False

    @contextmanager
    def _within_kernel(self) -> Generator[None]:
        """Keep nothing of a kernel but its result."""
        before, self._in_kernel = self._in_kernel, True
        try:
            yield
        finally:
            self._in_kernel = before

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See a compiled function as one operator, as torch's selective checkpoint does."""
        return True


class _Keep(_SelectiveMode):
    """Keeps the outputs of products, but those of a recompute within the forward."""

    def __init__(self, outputs: _Outputs, recomputes: Callable[[], bool]):
        super().__init__(outputs)
        self._recomputes = recomputes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._in_kernel:
            return output
        if is_kept(func, args, kwargs or {}) and not self._recomputes():
            self._outputs.keep(next(self._calls), output)
        elif func in _UNSAFE_VIEWS:
            self._outputs.watch(args[0], output)
        return output

    def of_kernel(self, compute: Callable[[], T]) -> T:
        with self._within_kernel():
            output = compute()
        if not self._recomputes():
            self._outputs.keep(next(self._calls), output)
        return output


class _Take(_SelectiveMode):
    """Takes the outputs of products that the forward kept, and computes the others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kept = not self._in_kernel and is_kept(func, args, kwargs or {})
        output = self._outputs.take(next(self._calls)) if kept else None
        return func(*args, **(kwargs or {})) if output is None else output

    def of_kernel(self, compute: Callable[[], T]) -> T:
        output = self._outputs.take(next(self._calls))
        if output is None:
            with self._within_kernel():
                output = compute()
        return output


_blocks: WeakKeyDictionary[nn.Module, _Block] = WeakKeyDictionary()
"""The blocks of this process that have hooks."""
_running: list[tuple[nn.Module, _Block]] = []
"""The blocks with recompute whose forward has begun, outermost first."""


def end_interrupted(root: nn.Module) -> None:
    """End the forwards of blocks within `root` that an interrupt has ended: torch calls hooks for errors alone."""
    if _running:
        within = set(root.modules())
        for module, block in [each for each in reversed(_running) if each[0] in within]:
            _running.remove((module, block))
            block.interrupt()


def recompute_blocks(modules: Iterable[nn.Module], recompute: RecomputeMode) -> None:
    """Have each of `modules` recompute its activations as asked, from its next forward on."""
    for module in modules:
        if module not in _blocks:
            _blocks[module] = _Block(module)
        _blocks[module].recompute = recompute


def calls_in_pass(module: nn.Module) -> Calls:
    """Return the calls of a block since `begin_pass`."""
    return _blocks[module].calls if module in _blocks else Calls()


def begin_pass(modules: Iterable[nn.Module]) -> None:
    """Forget the calls of the blocks among `modules`: a pass begins."""
    for module in modules:
        if module in _blocks:
            _blocks[module].calls = Calls()
