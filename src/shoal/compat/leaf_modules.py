"""Modules that published scripts ask to be gathered whole (`set_z3_leaf_modules`).

A module that calls only some of its children, as a mixture of experts does, must be gathered as one, or ranks that call
different children wait for each other. The published functions mark modules by `shoal.zero.set_leaf_modules`, before
`initialize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

from torch import nn

from shoal.compat.deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from shoal.compat.raising import as_published
from shoal.errors import UsageError
from shoal.zero import get_leaf_modules, set_leaf_modules

__all__ = ["get_z3_leaf_modules", "mark_configured", "set_z3_leaf_module", "set_z3_leaf_modules",
           "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module",
           "z3_leaf_parameter"]

_named: WeakSet[nn.Module] = WeakSet()
"""Modules that the functions below marked or unmarked: a parameter does not tell its modules."""

Classes = Iterable[type | str]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is marked to be gathered whole."""
    return any(leaf is model for leaf in get_leaf_modules(model))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether the parameter belongs to a marked module."""
    return any(parameter is model for module in _named if z3_leaf_module(module) for parameter in module.parameters())


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take its mark away."""
    _named.add(model)
    set_leaf_modules(model, [model], is_leaf=flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of `model`."""
    return get_leaf_modules(model)


@as_published
def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True) -> list[nn.Module]:
    """Mark the modules of these classes (or names of classes); raises `ValueError` if there are none. Returns them."""
    return _mark_classes("set_z3_leaf_modules", model, leaf_module_classes, True, raise_if_not_found)


@as_published
def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Classes,
                          raise_if_not_found: bool = True) -> list[nn.Module]:
    """Take the marks of these classes (or names of classes) away; raises `ValueError` if there are none. Returns them."""
    return _mark_classes("unset_z3_leaf_modules", model, leaf_module_classes, False, raise_if_not_found)


@as_published
def set_z3_leaf_modules_by_name(model: nn.Module, module_names: Iterable[str], flag: bool = True,
                                raise_if_not_found: bool = True) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names; returns them, and the names that no module has. Raises `ValueError` if none has."""
    return _mark_names("set_z3_leaf_modules_by_name", model, module_names, str.__eq__, flag, raise_if_not_found)


@as_published
def set_z3_leaf_modules_by_suffix(model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True,
                                  raise_if_not_found: bool = True) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so; returns them, and the ends that no name has. Raises `ValueError` if none has."""
    return _mark_names("set_z3_leaf_modules_by_suffix", model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def mark_configured(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Mark the modules of `model` that `zero_optimization.leaf_module` names, or the published mixtures of experts."""
    zero = config.get("zero_optimization")
    section = DeepSpeedZeroLeafModuleConfig(**((zero.get("leaf_module") or {}) if isinstance(zero, Mapping) else {}))
    set_z3_leaf_modules(model, section.classes, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, section.names, raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, section.name_suffixes, raise_if_not_found=False)


def _mark_classes(call: str, model: nn.Module, classes: Classes, flag: bool, required: bool) -> list[nn.Module]:
    wanted = list(classes)
    if not all(isinstance(each, type | str) for each in wanted):  # pyright: ignore[reportUnnecessaryIsInstance]  a script's
        raise UsageError(f"{call}: got {wanted}; give classes of modules, or their names")
    found = [module for module in model.modules() if any(_is_of(module, each) for each in wanted)]
    _require(call, found, wanted, model, required)
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return type(module) is wanted
    kind = type(module)
    return wanted in (kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}")


def _mark_names(call: str, model: nn.Module, wanted: Iterable[str], fits: Callable[[str, str], bool], flag: bool,
                required: bool) -> tuple[list[nn.Module], list[str]]:
    wanted = list(wanted)
    found = {module: name for name, module in model.named_modules() if any(fits(name, each) for each in wanted)}
    _require(call, list(found), wanted, model, required)
    for module in found:
        set_z3_leaf_module(module, flag)
    return list(found), [each for each in wanted if not any(fits(name, each) for name in found.values())]


def _require(call: str, found: list[nn.Module], wanted: Iterable[type | str], model: nn.Module, required: bool) -> None:
    if required and not found:
        names = sorted({type(module).__name__ for module in model.modules()})
        raise UsageError(f"{call}: the model has no module of {list(wanted)}; its classes are {', '.join(names)}")
