"""A script may give a parameter other memory: `p.data = x`, `vector_to_parameters`, `model.double().float()`, channels_last.

What is gathered, reduced and stepped is the buffer of a unit, whose views the parameters are. Forward and backward use what
the script has put there, as always. Before a step its values are copied into the buffer, and the parameter is a view of it
again; until then the buffer is left alone, so that averaged weights can be swapped in for an evaluation, and out again. A
unit that is released takes them over before (`other_memory.py`). What the buffer cannot hold raises at the next forward, and
so do parameters that the model gained after `initialize`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.module_hooks import is_scripted
from shoal.zero.other_memory import check_fit, load_replaced, replaced_slots
from shoal.zero.unit import Unit

__all__ = ["ReplacedParameters"]


class ReplacedParameters:
    """Finds the parameters of one root that a script has given other memory, replaced by other objects, or added."""

    def __init__(self, root: nn.Module, units: Iterable[Unit]):
        units = list(units)
        names = {member.parameter: member.name for unit in units for member in unit.members}
        self._root = root
        self._units = [unit for unit in units if unit.keeps_writes]  # others take over writes at their release
        self._released = [unit for unit in self._units if unit.reshards]
        self._views = [(unit, [(member.parameter, slot.start * unit.full.element_size()) for slot, member in zip(
            unit.layout.slots, unit.members, strict=True) if member.parameter.numel()]) for unit in self._units]
        self._places = [(place, key, parameter, names[parameter]) for place in map(_parameters_of, _modules(root))
                        for key, parameter in place.items() if isinstance(parameter, nn.Parameter) and parameter in names]
        self._known = set(root.parameters())
        self._members = _ModuleMembers(root)

    def check(self, *, training: bool) -> None:
        """Look for such parameters before a forward; take over the values of those that are released after their use.

        Raises `UsageError`, naming the parameter, for values that the buffer cannot hold; with `training` also for another
        `nn.Parameter` in the place of one that the engine trains, and for one that the model gained.
        """
        for unit in self._released:
            load_replaced(unit)
        if training:
            for unit in self._units if self._has_replaced() else ():
                check_fit(unit, self._units)
            if any(place.get(key) is not parameter for place, key, parameter, _ in self._places):
                self._refuse_other_objects()
            if self._members.has_changed():
                self._refuse_new_parameters()

    def load(self) -> None:
        """Take over the values of all such parameters. Raises `UsageError` as `check` does."""
        for unit in self._units if self._has_replaced() else ():
            check_fit(unit, self._units)
            load_replaced(unit)

    def _has_replaced(self) -> bool:
        """Whether a parameter of a gathered unit is no view of its buffer: the same as `replaced_slots`, for every step."""
        for unit, views in self._views:
            if unit.holds_values:
                start = unit.full.data_ptr()
                if any(p.data_ptr() != start + offset or not p.is_contiguous() for p, offset in views):
                    return True
        return False

    def refuse(self, call: str) -> None:
        """Raise `UsageError` from `call` for a parameter that has other values than the buffer."""
        for unit in self._units:
            slots = replaced_slots(unit)
            views = unit.layout.views(unit.full) if slots else []  # the buffer of a released unit may have no memory
            for slot in slots:
                name, value = unit.members[slot].name, unit.members[slot].parameter.detach()
                if value.dtype != views[slot].dtype or not torch.equal(value, views[slot]):
                    raise UsageError(f"{call}: parameter '{name}' was given other memory since the last step (p.data = "
                                     f"...), and the engine trains another value: swap the former memory in again first, "
                                     f"or take a step, or write the value within shoal.gathered(model, modifier_rank=0)")

    def _refuse_other_objects(self) -> None:
        """Raise for parameters that the model has lost. (`functional_call` puts plain tensors in their places.)"""
        here = set(self._root.parameters())
        for place, key, parameter, name in self._places:
            other = place.get(key)
            if parameter not in here and (other is None or isinstance(other, nn.Parameter)):
                raise UsageError(
                    f"forward: parameter '{name}' is {'no part of the model' if other is None else 'another object'} since "
                    f"initialize, and the engine would go on to train the old one. Write into the parameter instead "
                    f"(p.data = value, load_state_dict without assign=True), or change the model before initialize. Give "
                    f"torch.export, which replaces parameters, a copy.deepcopy of the model")

    def _refuse_new_parameters(self) -> None:
        """Raise for trainable parameters that the model has gained: no optimizer steps them, no rank averages them."""
        gained = {name: parameter for name, parameter in self._root.named_parameters()
                  if isinstance(parameter, nn.Parameter)  # pyright: ignore[reportUnnecessaryIsInstance]  functional_call
                  and parameter not in self._known}
        for name in (name for name, parameter in gained.items() if parameter.requires_grad):
            raise UsageError(
                f"forward: parameter '{name}' was added to the model after initialize, and the engine would not train it. "
                f"Change the model first (a new head, get_peft_model), then call initialize; or freeze the parameter by "
                f"requires_grad_(False)")
        if not gained:  # a frozen one may be thawed
            self._members = _ModuleMembers(self._root)


class _ModuleMembers:
    """Which children each module of a root has, and how many parameters: asked before every forward, hence bare dicts."""

    def __init__(self, root: nn.Module):
        self._children = [(children, key, child) for module in _modules(root) for children in (_children_of(module),)
                          for key, child in children.items()]
        self._counts = [(place, len(place)) for module in _modules(root)
                        for place in (_children_of(module), _parameters_of(module))]

    def has_changed(self) -> bool:
        """Whether a module or a parameter was added, or a module removed or replaced."""
        return (any(len(place) != count for place, count in self._counts)
                or any(children.get(key) is not child for children, key, child in self._children))


def _modules(root: nn.Module) -> list[nn.Module]:
    """Return the modules of `root` whose members may change: those of TorchScript do not."""
    return [module for module in root.modules() if not is_scripted(module)]


def _children_of(module: nn.Module) -> dict[str, object]:
    """Return the dict that `module` keeps its own children in."""
    return vars(module)["_modules"]


def _parameters_of(module: nn.Module) -> dict[str, object]:
    """Return the dict that `module` keeps its own parameters in."""
    return vars(module)["_parameters"]
