"""torch.compile and an engine: compiled modules keep their parameters' names, and are divided where weights are released.

`torch.compile(module)` wraps a module, and `_orig_mod.` enters the names of its parameters. An engine takes the wrappers
off, and compiles the forward of what was wrapped in the same way; `destroy` puts them back. A module around blocks whose
weights are gathered and released one after the other is compiled block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, skip_code

__all__ = ["Compilation"]

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class _CompiledForward:
    """The compiled forward of one module. A copy of the module, or a pickled one, has the plain forward."""

    def __init__(self, module: nn.Module, compile_: Compile):
        self._module = module
        self._own = vars(module).get("forward")  # a forward that a script has set on this one module
        self._call = compile_(module.forward)
        module.forward = self

    def remove(self) -> None:
        """Give the module its plain forward."""
        module = self._module
        if self._own is None:
            del module.forward
        else:
            module.forward = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._own is None:  # the method of the copy, where the module is copied
            return getattr, (self._module, "forward")
        return _same, (self._own,)


skip_code(_CompiledForward.__call__.__code__)  # a graph begins in the module's own forward


class Compilation:
    """The modules of one model whose forwards are compiled, and the wrappers that were taken off."""

    def __init__(self) -> None:
        self._compiled: list[nn.Module] = []
        self._wrappers: list[tuple[nn.Module, str, nn.Module]] = []  # (parent, name, wrapper) of children
        self._asked: list[tuple[nn.Module, OptimizedModule]] = []

    def __bool__(self) -> bool:
        return bool(self._compiled)

    @contextmanager
    def undone_on_failure(self) -> Generator[None]:
        """Give the model back as it was if the context raises."""
        try:
            yield
        except BaseException:
            self.undo()
            raise

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Take the wrappers of torch.compile off `model` and the modules within it; return the model itself."""
        model = self._unwrapped(model)
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, child in modules.items():
            parent, _, name = path.rpartition(".")
            if isinstance(child, OptimizedModule) and not isinstance(modules[parent], OptimizedModule):
                self._wrappers.append((modules[parent], name, child))
                setattr(modules[parent], name, self._unwrapped(child))
        return model

    def apply(self, roots: Iterable[nn.Module], model: nn.Module, separate: set[nn.Module]) -> None:
        """Compile what was wrapped; `separate` modules each by itself, for their weights are released after each call.

        The forward of `model` is that of its `roots`.
        """
        for module, wrapper in self._asked:
            for region in roots if module is model else (module,):
                within = _outermost(region, separate)
                self.compile(within, wrapper.dynamo_ctx)
                if not within or not wrapper.dynamo_ctx.fullgraph:
                    self.compile([region], wrapper.dynamo_ctx)

    def compile(self, modules: Iterable[nn.Module], compile_: Compile) -> None:
        """Compile the forward of each of `modules` by itself, unless it is compiled."""
        for module in modules:
            if not isinstance(module.forward, _CompiledForward):
                _CompiledForward(module, compile_)
                self._compiled.append(module)

    def undo(self) -> None:
        """Give every module its plain forward, and the model its wrappers back."""
        for module in self._compiled:
            if isinstance(compiled := module.forward, _CompiledForward):
                compiled.remove()
        for parent, name, wrapper in self._wrappers:
            setattr(parent, name, wrapper)
        self._compiled, self._wrappers, self._asked = [], [], []

    def _unwrapped(self, module: nn.Module) -> nn.Module:
        while isinstance(module, OptimizedModule):
            wrapper, module = module, module.get_submodule("_orig_mod")
            self._asked.append((module, wrapper))
        return module


def _outermost(region: nn.Module, separate: set[nn.Module]) -> list[nn.Module]:
    """Return the outermost of the `separate` modules within `region`, itself apart."""
    found: dict[nn.Module, None] = {}
    for child in region.children():
        found |= dict.fromkeys([child] if child in separate else _outermost(child, separate))
    return list(found)


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
