"""Which parameters form a unit: the repeated blocks of the model, its large layers outside them, and the rest in the root.

A block is a child of a `ModuleList` or `Sequential` whose class occurs there more than once; a large layer, such as an
embedding, has no children and `LARGE` elements or more. `set_leaf_modules` makes a block of any other module. A parameter
belongs to the outermost block or large layer that contains it. A parameter that several of them share belongs to the root.
A module of TorchScript takes no hooks, so it is neither, and its parameters belong to what contains it.
The weight of embeddings made with `sparse=True` is a unit by itself wherever it is. All parameters of a unit have one dtype,
are all trainable or all frozen, and rest over the same ranks, so one block may form several units. Parameters that are
neither floating point nor complex, those of no elements, and codes in a float dtype stay whole on every rank.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.mesh.parameter_groups import ReplicaGroup
from shoal.module_hooks import is_scripted
from shoal.sparse.embeddings import has_sparse_gradient, sparse_weights
from shoal.zero.unit_state import Member

LARGE = 1 << 18
"""Elements (1 MiB in fp32) from which a layer outside of blocks is worth a gather and a reduction of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """The parameters of a unit that is to be made, and the module around whose calls it is gathered."""

    name: str
    module: nn.Module
    members: tuple[Member, ...]
    trainable: bool
    dtype: torch.dtype
    persistent: bool
    replica_group: ReplicaGroup
    columns: int | None = None
    """Of an embedding whose gradient is rows: each rank owns whole ones."""


def blocks(model: nn.Module) -> dict[nn.Module, str]:
    """Return the outermost repeated blocks and large layers of `model` and their names, in order of definition."""
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        children = {} if module in _leaves else dict(module.named_children())
        children = {name: child for name, child in children.items() if not is_scripted(child)}
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        counts = Counter(type(child) for child in children.values()) if listed else Counter[type]()
        for name, child in children.items():
            path = f"{prefix}{name}"
            repeated = counts[type(child)] > 1 and any(True for _ in child.parameters())
            if repeated or _is_large_layer(child) or child in _leaves:
                found.setdefault(child, path)
            else:
                visit(child, path + ".")

    visit(model, "")
    return {module: path for path, module in model.named_modules()
            if module in found or (has_sparse_gradient(module) and not is_scripted(module))}


def set_leaf_modules(model: nn.Module, leaves: Iterable[nn.Module | type[nn.Module] | str], *,
                     is_leaf: bool = True) -> list[nn.Module]:
    """Have modules of `model` gathered whole where their forward begins, whichever of their parts it calls; return them.

    `leaves` are modules, classes, or names as in `named_modules`. Call it before `initialize`. At stage 3 each repeated
    block is gathered where it is called itself, which every rank must do in one order. Where ranks choose among blocks
    (experts, the encoder of a modality), the module that chooses is to be a leaf. A leaf within a block changes nothing: a
    block is gathered whole. With `is_leaf` false they are leaves no more. Raises `UsageError` for an entry that matches no
    module.
    """
    found: dict[nn.Module, None] = {}
    for leaf in leaves:
        matching = [module for name, module in model.named_modules()
                    if module is leaf or name == leaf or (isinstance(leaf, type) and isinstance(module, leaf))]
        if not matching:
            raise UsageError(f"set_leaf_modules: got {leaf if isinstance(leaf, str) else repr(leaf)}, which matches no "
                             f"module of {type(model).__name__}; give modules, classes of modules, or names of "
                             f"named_modules()")
        found |= dict.fromkeys(matching)
    for module in found:
        (_leaves.add if is_leaf else _leaves.discard)(module)
    return list(found)


def get_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` that are gathered whole."""
    return [module for module in model.modules() if module in _leaves]


_leaves: WeakSet[nn.Module] = WeakSet()


def _is_large_layer(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and sum(p.numel() for p in module.parameters()) >= LARGE


def partition(model: nn.Module, groups: dict[nn.Parameter, int], replica_group_of: Callable[[str], ReplicaGroup], *,
              roots: Mapping[nn.Module, str] | None = None, aliases: Mapping[str, str] | None = None,
              persistent_below: int = 0, persistent_at_most: int = sys.maxsize) -> list[UnitSpec]:
    """Divide the parameters of `model` into units, in order of definition, a root's first.

    Units that several stages hold come before all others and in one order on every rank, whatever the order of layers
    there: ranks of different stages broadcast them together. They belong to the first root.

    `groups` gives the optimizer group of each trainable parameter; one that is in no group is never stepped and counts
    as frozen. `replica_group_of` names the ranks that hold a parameter. Parameters of at most
    `persistent_below` elements form units of their own, whose weights stay whole, until they are `persistent_at_most`
    elements together.

    `roots` are the modules whose forwards are passes of their own, by name (default: the model); `aliases` gives the name
    of each parameter that has another name in this model.
    """
    roots = roots or {model: ""}
    names = {parameter: (aliases or {}).get(name, name) for name, parameter in model.named_parameters()}
    paths = {module: path for path, module in model.named_modules()} | dict(roots)
    tables = sparse_weights(model)
    members_of: dict[_Key, list[Member]] = {}
    order: dict[nn.Module, int] = {}
    seen: set[nn.Parameter] = set()
    first = next(iter(roots))
    kept = 0
    for root in roots:
        found = blocks(root)
        for module in (root, *found):
            order[module] = len(order)
        for parameter, module in _owners(root, found).items():
            if parameter in seen or not has_unit(parameter):
                continue
            seen.add(parameter)
            held = replica_group_of(names[parameter])
            persistent = parameter.numel() <= persistent_below and kept + parameter.numel() <= persistent_at_most
            kept += parameter.numel() if persistent else 0
            key = _Key(module=first if held.spans_stages else module, dtype=parameter.dtype,
                       trainable=parameter.requires_grad and parameter in groups,
                       persistent=persistent or held.spans_stages, replica_group=held,
                       table=parameter if parameter in tables and not held.spans_stages else None)
            member = Member(name=names[parameter], parameter=parameter, group=groups.get(parameter, 0))
            members_of.setdefault(key, []).append(member)
    several = len({key.replica_group for key in members_of}) > 1
    return [key.spec(_unit_name(paths[key.module], key, several, tables), members)
            for key, members in sorted(members_of.items(), key=lambda item: item[0].place(order))]


def has_unit(parameter: nn.Parameter) -> bool:
    """Whether a unit holds the parameter; one of whole numbers, a quantised one, and one of no elements stay whole."""
    return bool(parameter.numel()) and (has_float_values(parameter) or parameter.is_complex())


def has_float_values(parameter: nn.Parameter) -> bool:
    """Whether the values of a float dtype are numbers, and no codes that a conversion would destroy."""
    return parameter.is_floating_point() and not isinstance(parameter, _Codes)


@runtime_checkable
class _Codes(Protocol):
    """A parameter whose bytes are codes, in whatever dtype stores them.

    That of bitsandbytes, `Params4bit`; before it is on a device it still has the weights, and quantises them on the way.
    """

    quant_state: object


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """The properties that all parameters of one unit share."""

    module: nn.Module
    trainable: bool
    dtype: torch.dtype
    persistent: bool
    replica_group: ReplicaGroup
    table: nn.Parameter | None = None
    """The embedding that is a unit by itself."""

    def place(self, order: Mapping[nn.Module, int]) -> tuple[object, ...]:
        """Return where the unit stands among all, of modules in `order`."""
        if self.replica_group.spans_stages:
            return 0, self.replica_group.order, self.trainable, str(self.dtype)
        return 1, order[self.module]

    def spec(self, name: str, members: list[Member]) -> UnitSpec:
        ordered = sorted(members, key=lambda member: (member.group, member.name if self.replica_group.spans_stages else ""))
        columns = None if self.table is None else self.table.shape[1]
        return UnitSpec(name=name, module=self.module, trainable=self.trainable, dtype=self.dtype,
                        persistent=self.persistent, replica_group=self.replica_group, members=tuple(ordered),
                        columns=columns)


def _owners(root: nn.Module, found: dict[nn.Module, str]) -> dict[nn.Parameter, nn.Module]:
    """Return for each parameter the module that owns it: the root or one of those that were `found` in it."""
    owners: dict[nn.Parameter, nn.Module] = {}

    def visit(module: nn.Module, owner: nn.Module) -> None:
        owner = module if module in found else owner
        for parameter in module.parameters(recurse=False):
            if owners.setdefault(parameter, owner) is not owner:
                owners[parameter] = root
        for child in module.children():
            visit(child, owner)

    visit(root, root)
    return owners


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the other names of shared parameters: {alias: first name}."""
    first: dict[nn.Parameter, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            aliases[name] = first[parameter]
    return aliases


def _unit_name(path: str, key: _Key, several: bool, tables: Mapping[nn.Parameter, str]) -> str:
    if key.table is not None and not has_sparse_gradient(key.module):  # several embeddings share it
        path = tables[key.table]
    if key.replica_group.spans_stages:
        return "tied" if key.trainable else "tied frozen"
    shared = several and key.replica_group.tensor_replicated
    marks = [mark for mark, on in (("frozen", not key.trainable), ("small", key.persistent), ("uncut", shared)) if on]
    return " ".join([path or "root", *marks])
