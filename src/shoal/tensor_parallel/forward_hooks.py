"""What happens at the calls of a module that itself stays as it is: its input comes and its output goes as a region asks.

A door works on one argument, by its name in `forward`, however the caller passes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from shoal.config.problem import nearest
from shoal.errors import UsageError
from shoal.tensor_parallel.axis import Axis
from shoal.tensor_parallel.random import Apart
from shoal.tensor_parallel.regions import enter, gather, split

__all__ = ["RankLocalRng", "enter_at", "gather_after", "split_at"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def enter_at(module: nn.Module, argument: str, axis: Axis, dim: int | None) -> None:
    """Let `argument` enter the region of several cut layers at once, as the module is called."""
    hook = _ArgumentHook(_position(module, argument), argument, _EnterHook(axis, dim))
    module.register_forward_pre_hook(hook, with_kwargs=True)


def split_at(module: nn.Module, argument: str, axis: Axis, dim: int) -> None:
    """Split `argument` along `dim` as the module is called."""
    hook = _ArgumentHook(_position(module, argument), argument, _SplitHook(axis, dim))
    module.register_forward_pre_hook(hook, with_kwargs=True)


def gather_after(module: nn.Module, axis: Axis, dim: int) -> None:
    """Gather the module's output, or the first of several, along `dim`."""
    module.register_forward_hook(_GatherHook(axis, dim))


@dataclass(slots=True)
class RankLocalRng:
    """Within a module's calls in training, each rank draws its own random numbers, until a row layer makes values whole."""

    apart: Apart
    _open: ExitStack = field(default_factory=ExitStack)

    def attach(self, module: nn.Module) -> None:
        """Open at the module's calls, and close after them, also when they fail."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self.leave, always_call=True)

    def leave(self, *_: object) -> None:
        """Close, if it is open."""
        self._open.close()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            self._open.enter_context(self.apart.fork(device))


@dataclass(frozen=True, slots=True)
class _ArgumentHook:
    """A hook that replaces one argument."""

    position: int
    name: str
    change: Callable[[Tensor], Tensor]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        if self.position < len(args):
            changed = self.change(args[self.position])
            return (*args[:self.position], changed, *args[self.position + 1:]), kwargs
        return args, {**kwargs, self.name: self.change(kwargs[self.name])}


@dataclass(frozen=True, slots=True)
class _EnterHook:
    axis: Axis
    dim: int | None

    def __call__(self, tensor: Tensor) -> Tensor:
        return enter(tensor, self.axis, self.dim)


@dataclass(frozen=True, slots=True)
class _SplitHook:
    axis: Axis
    dim: int

    def __call__(self, tensor: Tensor) -> Tensor:
        return split(tensor, self.axis, self.dim)


@dataclass(frozen=True, slots=True)
class _GatherHook:
    axis: Axis
    dim: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return gather(output, self.axis, self.dim)
        first, *others = cast("tuple[Tensor, ...]", output)
        return gather(first, self.axis, self.dim), *others


def _position(module: nn.Module, argument: str) -> int:
    names = list(inspect.signature(module.forward).parameters)
    if argument not in names:
        close = nearest(argument, names)
        raise UsageError(f"{type(module).__name__}.forward has no argument {argument!r}" + (
            f"; did you mean {close!r}?" if close else ".") + f" It has {', '.join(names)}")
    return names.index(argument)
