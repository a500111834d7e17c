"""Forward hooks beside torch.compile: how a compiled graph sees the hooks of the modules within it.

    RegionHook    leaves no trace in a graph: torch.compile traces the module as if it had no hook, and calls the engine once
    opaque        ends a graph before the hook and begins another after it; inside the hook nothing is compiled
    opaque_frame  the same of one function, within which what it calls is compiled
    uncompiled    a function that autograd calls outside of graphs becomes no graph of its own, at no cost

Weights that stay in memory need a hook only where a forward begins, so their modules have region hooks, and a graph spans
any number of them. Weights that are released between uses need opaque hooks: a graph of two such blocks would need the
weights of both at once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code

from shoal.interrupts import HANDLER_CODES

__all__ = ["RegionHook", "opaque", "opaque_frame", "uncompiled"]

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=FunctionType)

_REASON = ("Shoal gathers sharded or offloaded weights here, block by block, outside of every graph: compile the blocks, by "
           "engine.compile(), by block.compile() for each, or without fullgraph=True")


def opaque(function: Callable[P, T]) -> Callable[P, T]:
    """Exclude `function`, and all that it calls, from the graphs of torch.compile."""
    return cast("Callable[P, T]", torch.compiler.disable(function, reason=_REASON))


def opaque_frame(function: Callable[P, T]) -> Callable[P, T]:
    """Exclude `function` itself from the graphs of torch.compile, but not what it calls."""
    return cast("Callable[P, T]", torch.compiler.disable(function, recursive=False))


def uncompiled(function: F) -> F:
    """Have torch.compile leave `function` alone, which calls no Python code but such; `opaque` takes 0.3 microseconds."""
    skip_code(function.__code__)
    return function


class RegionHook:
    """A module's forward hook that is not part of the graph where the module is; `entered` is called once a graph has it."""

    def __init__(self, hook: Callable[..., None], entered: Callable[[nn.Module], None], module: nn.Module):
        """`entered(module)` is called while torch.compile traces the module, before it looks at the module's parameters."""
        def note() -> bool:
            entered(module)
            return True

        self._hook = hook
        self._note = torch.compiler.assume_constant_result(note)  # run by the tracer; the graph gets its result

    def __call__(self, *hooked: Any) -> None:
        if torch.compiler.is_compiling():
            self._note()
        else:
            self._hook(*hooked)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """Let a deep copy of the model, or a pickled one, have a hook without an engine that does nothing."""
        return _without_engine, ()


# A hook that is called outside of a graph, by a module that is itself compiled, is no graph of its own; nor is a watch
for _code in (RegionHook.__call__.__code__, *HANDLER_CODES):
    skip_code(_code)


def _without_engine() -> Callable[..., None]:
    return _nothing


def _nothing(*hooked: Any) -> None:
    """Do nothing."""
