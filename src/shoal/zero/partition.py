"""Which parameters form a unit: the repeated blocks of the model, its large layers outside them, and the rest in the root.

A block is a child of a `ModuleList` or `Sequential` whose class occurs there more than once; a large layer, such as an
embedding, has no children and `LARGE` elements or more. Every parameter belongs to the outermost of these around it; one
that several share belongs to the root. A unit is of one dtype and is either
trainable or frozen, so that a block may give several. Parameters that are neither floating point nor complex, and those
of no elements, stay whole on every rank.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from shoal.zero.unit import Member

LARGE = 1 << 18
"""Elements (1 MiB in fp32) from which a layer outside of blocks is worth a gather and a reduction of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The parameters of one unit to be, and the module around whose calls it is gathered."""

    name: str
    module: nn.Module
    members: tuple[Member, ...]
    trainable: bool
    dtype: torch.dtype
    persistent: bool


def blocks(model: nn.Module) -> dict[nn.Module, str]:
    """Return the outermost repeated blocks and large layers of `model` and their names, in order of definition."""
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        children = dict(module.named_children())
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        kinds = Counter(type(child) for child in children.values()) if listed else Counter[type]()
        for name, child in children.items():
            path = f"{prefix}{name}"
            repeated = kinds[type(child)] > 1 and any(True for _ in child.parameters())
            if repeated or _is_large_layer(child):
                found.setdefault(child, path)
            else:
                visit(child, path + ".")

    visit(model, "")
    return found


def _is_large_layer(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and sum(p.numel() for p in module.parameters()) >= LARGE


def partition(model: nn.Module, groups: dict[nn.Parameter, int], *, persistent_below: int = 0,
              persistent_at_most: int = sys.maxsize) -> list[Share]:
    """Divide the parameters of `model` into units, in order of definition, the root's first.

    `groups` gives the optimizer group of each trainable parameter; one that is in no group is never stepped and counts
    as frozen. Parameters of at most `persistent_below` elements form units of their own, whose weights stay whole, until
    they are `persistent_at_most` elements together.
    """
    owners = _owners(model, blocks(model))
    shares: dict[tuple[nn.Module, bool, torch.dtype, bool], list[Member]] = {}
    names: dict[nn.Module, str] = {}
    kept = 0
    for parameter, (name, module, path) in owners.items():
        if not (parameter.is_floating_point() or parameter.is_complex()) or parameter.numel() == 0:
            continue
        trainable = parameter.requires_grad and parameter in groups
        persistent = parameter.numel() <= persistent_below and kept + parameter.numel() <= persistent_at_most
        kept += parameter.numel() if persistent else 0
        names[module] = path
        member = Member(name=name, parameter=parameter, group=groups.get(parameter, 0))
        shares.setdefault((module, trainable, parameter.dtype, persistent), []).append(member)
    order = {module: position for position, module in enumerate([model, *blocks(model)])}
    return [
        Share(name=_unit_name(names[module], trainable, persistent), module=module, trainable=trainable, dtype=dtype,
              persistent=persistent, members=tuple(sorted(members, key=lambda member: member.group)))
        for (module, trainable, dtype, persistent), members in sorted(shares.items(), key=lambda item: order[item[0][0]])
    ]


def _owners(model: nn.Module, found: dict[nn.Module, str]) -> dict[nn.Parameter, tuple[str, nn.Module, str]]:
    """Return for each parameter its first name, the module that owns it, and that module's name."""
    owners: dict[nn.Parameter, tuple[str, nn.Module, str]] = {}

    def visit(module: nn.Module, owner: nn.Module, path: str, prefix: str) -> None:
        if module in found:
            owner, path = module, found[module]
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in owners:
                owners[parameter] = (prefix + name, owner, path)
            elif owners[parameter][1] is not owner:
                owners[parameter] = (owners[parameter][0], model, "")
        for name, child in module.named_children():
            visit(child, owner, path, f"{prefix}{name}.")

    visit(model, model, "", "")
    return owners


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the other names of shared parameters: {alias: first name}."""
    first: dict[nn.Parameter, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            aliases[name] = first[parameter]
    return aliases


def _unit_name(path: str, trainable: bool, persistent: bool) -> str:
    marks = [mark for mark, on in (("frozen", not trainable), ("small", persistent)) if on]
    return " ".join([path or "root", *marks])
