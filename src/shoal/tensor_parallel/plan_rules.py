"""The rules of a plan: each kind is a value that knows how to convert a module which its pattern matches.

    Column, Heads, Row        linear layers: sliced by outputs, by heads of a fused projection, by inputs
    Vocabulary, Head          embedding and output layer with a sliced vocabulary
    Region                    a module around sliced layers that stays: attributes to divide, one `enter` for several layers
    Whole                     stays as it is on every rank, with all modules within it
    Norm, Dropout, Sequence   act where the plan splits tensors along the sequence; else the module stays as it is

A module that stays gets forward hooks, which enter, split or gather one argument or output. A hook finds its argument by the
name in `forward`, whether the caller passes it by position or by keyword.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from shoal.config.problem import nearest
from shoal.errors import UsageError
from shoal.mesh.tensor_slice import divided
from shoal.tensor_parallel.axis import Axis
from shoal.tensor_parallel.layers import ColumnLinear, RowLinear, qkv_parts, sizes_of
from shoal.tensor_parallel.part_init import ParameterSlices
from shoal.tensor_parallel.random import RankLocalRng
from shoal.tensor_parallel.regions import enter, gather, split
from shoal.tensor_parallel.replicated import PartDropout, Shared
from shoal.tensor_parallel.vocabulary import VocabularyEmbedding, VocabularyHead

__all__ = ["Column", "ConversionContext", "Dropout", "Head", "Heads", "Kind", "Norm", "Region", "Row", "Sequence",
           "Vocabulary", "Whole"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionContext:
    """The place of a module in the plan and the model, which a kind needs to convert it."""

    group: dist.ProcessGroup
    sequence_dim: int | None
    slices: ParameterSlices
    """The slices taken so far, which several modules may share."""
    path: str = ""
    """The name of the module."""
    entered: bool = False
    """Whether a region around the module enters its input already."""
    rng: RankLocalRng | None = None
    """The rank-local random stream of the nearest region around it that has one."""

    @property
    def axis(self) -> Axis:
        return Axis(self.group)


class Kind(ABC):
    """The conversion of a module that a pattern matches."""

    __slots__ = ()

    @abstractmethod
    def convert(self, module: nn.Module, context: ConversionContext) -> nn.Module:
        """Return the module that replaces `module`, or itself. Raises `UsageError` for a module that does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Kind):
    """A linear layer sliced by outputs. Each of `heads` stays whole on one rank; for the rest see `ColumnLinear`."""

    heads: int | None = None
    parts: tuple[int, ...] | None = None
    gather_output: bool = False
    input_first: bool = False

    def convert(self, module: nn.Module, context: ConversionContext) -> nn.Module:
        if self.heads is not None:
            divided(f"{self.heads} heads", self.heads, context.axis.ranks)
            _, outputs, _ = sizes_of(module, input_first=self.input_first)
            for size in self.parts or (outputs,):
                if size % self.heads:
                    raise UsageError(f"Column: {size} outputs are not {self.heads} heads of one size, and would be sliced "
                                     f"in the middle of one; give heads a number that divides {size}")
        return ColumnLinear.from_linear(module, context.group, parts=self.parts, gather_output=self.gather_output,
                                        sequence_dim=context.sequence_dim, entered=context.entered,
                                        input_first=self.input_first, slices=context.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads(Kind):
    """The fused projection to queries, keys and values, sliced by heads; see `QKVLinear`."""

    heads: int
    head_dim: int
    key_value_heads: int | None = None
    interleaved: bool = False
    input_first: bool = False

    def convert(self, module: nn.Module, context: ConversionContext) -> nn.Module:
        shared = self.heads if self.key_value_heads is None else self.key_value_heads
        parts = qkv_parts(self.heads, shared, self.head_dim, context.axis.ranks, interleaved=self.interleaved)
        return ColumnLinear.from_linear(module, context.group, parts=parts, sequence_dim=context.sequence_dim,
                                        entered=context.entered, input_first=self.input_first, slices=context.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Kind):
    """A linear layer sliced by inputs, which a column layer before it leaves sliced."""

    input_first: bool = False

    def convert(self, module: nn.Module, context: ConversionContext) -> nn.Module:
        layer = RowLinear.from_linear(module, context.group, sequence_dim=context.sequence_dim, input_first=self.input_first,
                                      slices=context.slices)
        if context.rng is not None:  # the output is whole, so that dropout after it draws alike
            layer.register_forward_pre_hook(context.rng.leave)
        return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary(Kind):
    """An `nn.Embedding` with a sliced vocabulary."""

    def convert(self, module: nn.Module, context: ConversionContext) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise UsageError(f"{type(module).__name__} is no nn.Embedding")
        return VocabularyEmbedding.from_embedding(module, context.group, slices=context.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head(Kind):
    """The linear layer to the scores of all words: whole, or without `gather_output` those of this rank's slice."""

    gather_output: bool = True

    def convert(self, module: nn.Module, context: ConversionContext) -> nn.Module:
        return VocabularyHead.from_linear(module, context.group, gather_output=self.gather_output, slices=context.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region(Kind):
    """A module around sliced layers, which stays except for attributes that hold its size.

    `divide` names integer attributes to divide by the ranks (`num_heads`). `enter` names the argument of its forward that
    all column layers within it take: it enters once for all of them, so no other module within may use it. `dropout`:
    before its row layer it drops values of this rank's heads, so each rank draws from a stream of its own.
    """

    divide: tuple[str, ...] = ()
    enter: str | None = None
    dropout: bool = False

    def convert(self, module: nn.Module, context: ConversionContext) -> nn.Module:
        own = {name: value for name, value in vars(module).items() if type(value) is int}
        for name in self.divide:
            if name not in own:
                close = nearest(name, own)
                raise UsageError(f"Region: {type(module).__name__} has no whole number {name!r} to divide" + (
                    f"; did you mean {close!r}?" if close else ".") + f" It has {', '.join(sorted(own)) or 'none'}")
            setattr(module, name, divided(f"{name} {own[name]}", own[name], context.axis.ranks))
        if self.enter is not None:
            _enter_argument(module, self.enter, context.axis, context.sequence_dim)
        if self.dropout:
            assert context.rng is not None
            context.rng.attach(module)
        return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Kind):
    """A module that stays as it is on every rank, with all modules within it that no other pattern matches.

    `follows` names its own parameters that may be tied to sliced ones; its forward must not use them.
    """

    follows: tuple[str, ...] = ()

    def convert(self, module: nn.Module, context: ConversionContext) -> nn.Module:
        return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Kind):
    """A norm with whole parameters between regions; with `per_head` a norm of this rank's heads, split sequence or not.

    With `gather_output` it gathers its output, which ends the split sequence.
    """

    per_head: bool = False
    gather_output: bool = False

    def convert(self, module: nn.Module, context: ConversionContext) -> nn.Module:
        if context.sequence_dim is None and not self.per_head:
            return module
        norm = Shared(module, context.group, name=context.path, sequence_dim=None if self.per_head else context.sequence_dim)
        if self.gather_output and context.sequence_dim is not None:
            _gather_output(norm, context.axis, context.sequence_dim)
        return norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout(Kind):
    """An `nn.Dropout` between regions."""

    def convert(self, module: nn.Module, context: ConversionContext) -> nn.Module:
        if not isinstance(module, nn.Dropout):
            raise UsageError(f"{type(module).__name__} is no nn.Dropout")
        return module if context.sequence_dim is None else PartDropout(
            module.p, module.inplace, group=context.group, name=context.path, sequence_dim=context.sequence_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence(Kind):
    """A module at which the split sequence begins or ends: its argument `split` is split, or its output gathered."""

    split: str | None = None
    gather_output: bool = False

    def convert(self, module: nn.Module, context: ConversionContext) -> nn.Module:
        if context.sequence_dim is not None and self.split is not None:
            _split_argument(module, self.split, context.axis, context.sequence_dim)
        if context.sequence_dim is not None and self.gather_output:
            _gather_output(module, context.axis, context.sequence_dim)
        return module


def _enter_argument(module: nn.Module, argument: str, axis: Axis, dim: int | None) -> None:
    """Enter `argument` once for several column layers at each call of the module."""
    hook = _ArgumentHook(_position(module, argument), argument, partial(enter, axis=axis, dim=dim))
    module.register_forward_pre_hook(hook, with_kwargs=True)


def _split_argument(module: nn.Module, argument: str, axis: Axis, dim: int) -> None:
    """Split `argument` along `dim` at each call of the module."""
    hook = _ArgumentHook(_position(module, argument), argument, partial(split, axis=axis, dim=dim))
    module.register_forward_pre_hook(hook, with_kwargs=True)


def _gather_output(module: nn.Module, axis: Axis, dim: int) -> None:
    """Gather the module's output, or the first of several, along `dim`."""
    module.register_forward_hook(_GatherHook(axis, dim))


@dataclass(frozen=True, slots=True)
class _ArgumentHook:
    """A forward pre-hook that replaces one argument."""

    position: int
    name: str
    change: Callable[[Tensor], Tensor]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        if self.position < len(args):
            changed = self.change(args[self.position])
            return (*args[:self.position], changed, *args[self.position + 1:]), kwargs
        return args, {**kwargs, self.name: self.change(kwargs[self.name])}


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
