"""Facts about a module's hooks: who registered them, whether it accepts any, whether a call runs more than the forward."""

# pyright: reportPrivateUsage=false
# (torch has no public names for the tables of hooks.)

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["has_hooks", "is_compiled", "is_scripted"]


def has_hooks(module: nn.Module, *ignored: str) -> bool:
    """Whether a call of the module does more than its forward; hooks of the packages `ignored` do not count."""
    tables = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return any(_package_of(hook) not in ignored for table in tables for hook in table.values())


def _package_of(hook: Any) -> str:
    """Return the package of a function, or of the class of a method or an object."""
    return str(getattr(hook.func if isinstance(hook, partial) else hook, "__module__", "")).partition(".")[0]


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` compiled the calls of this module."""
    return module._compiled_call_impl is not None


def is_scripted(module: nn.Module) -> bool:
    """Whether the module is TorchScript's, scripted, traced or loaded: it takes no hooks and has no dicts of its members."""
    return isinstance(module, torch.jit.ScriptModule)
