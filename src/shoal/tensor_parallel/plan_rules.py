"""What a plan does with a module: each kind is a value, and knows how to convert a module that its pattern matches.

    Column, Heads, Row          linear layers: cut by outputs, by heads of a fused projection, by inputs
    Vocabulary, Head          embedding and output layer over a cut vocabulary
    Region                    a module around cut layers that stays: attributes to divide, one entrance for several layers
    Whole                     stays as it is on every rank, with all that is within it
    Norm, Dropout, Sequence   where tensors are split along the sequence, if the plan asks for that; else as they are
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from shoal.config.problem import nearest
from shoal.errors import UsageError
from shoal.mesh.tensor_slice import divided
from shoal.tensor_parallel.axis import Axis
from shoal.tensor_parallel.forward_hooks import RankLocalRng, enter_at, gather_after, split_at
from shoal.tensor_parallel.layers import ColumnLinear, RowLinear, qkv_parts, sizes_of
from shoal.tensor_parallel.part_init import Taken
from shoal.tensor_parallel.replicated import PartDropout, Shared
from shoal.tensor_parallel.vocabulary import VocabularyEmbedding, VocabularyHead

__all__ = ["Column", "Dropout", "Head", "Heads", "Kind", "Norm", "Region", "Row", "Sequence", "Site", "Vocabulary", "Whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a kind needs to know to convert a module, beside the module."""

    group: dist.ProcessGroup
    sequence_dim: int | None
    taken: Taken
    """Parts of parameters, which several modules may share."""
    path: str = ""
    """The name of the module."""
    entered: bool = False
    """Whether its input has entered the region already, through a module around it."""
    streams: RankLocalRng | None = None
    """Those of the nearest region around it that has some."""

    @property
    def axis(self) -> Axis:
        return Axis(self.group)


class Kind(ABC):
    """What is done with a module that a pattern matches."""

    __slots__ = ()

    @abstractmethod
    def convert(self, module: nn.Module, site: Site) -> nn.Module:
        """Return what takes the module's place: another, or itself. Raises `UsageError` for one that does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Kind):
    """A linear layer whose outputs are cut. `heads` of them must stay whole; for the rest see `ColumnLinear`."""

    heads: int | None = None
    parts: tuple[int, ...] | None = None
    gather_output: bool = False
    input_first: bool = False

    def convert(self, module: nn.Module, site: Site) -> nn.Module:
        if self.heads is not None:
            divided(f"{self.heads} heads", self.heads, site.axis.ranks)
            _, outputs, _ = sizes_of(module, input_first=self.input_first)
            for size in self.parts or (outputs,):
                if size % self.heads:
                    raise UsageError(f"Column: {size} outputs are not {self.heads} heads of one size, and would be cut in "
                                     f"the middle of one; give heads a number that divides {size}")
        return ColumnLinear.from_linear(module, site.group, parts=self.parts, gather_output=self.gather_output,
                                        sequence_dim=site.sequence_dim, entered=site.entered, input_first=self.input_first,
                                        taken=site.taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads(Kind):
    """A linear layer that is the fused projection to queries, keys and values: cut by heads, as `QKVLinear` is."""

    heads: int
    head_dim: int
    key_value_heads: int | None = None
    interleaved: bool = False
    input_first: bool = False

    def convert(self, module: nn.Module, site: Site) -> nn.Module:
        shared = self.heads if self.key_value_heads is None else self.key_value_heads
        parts = qkv_parts(self.heads, shared, self.head_dim, site.axis.ranks, interleaved=self.interleaved)
        return ColumnLinear.from_linear(module, site.group, parts=parts, sequence_dim=site.sequence_dim,
                                        entered=site.entered, input_first=self.input_first, taken=site.taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Kind):
    """A linear layer whose inputs are cut, as a column layer leaves them."""

    input_first: bool = False

    def convert(self, module: nn.Module, site: Site) -> nn.Module:
        layer = RowLinear.from_linear(module, site.group, sequence_dim=site.sequence_dim, input_first=self.input_first,
                                      taken=site.taken)
        if site.streams is not None:  # what comes out is whole, and so is dropout after it
            layer.register_forward_pre_hook(site.streams.leave)
        return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary(Kind):
    """An `nn.Embedding` whose words are cut."""

    def convert(self, module: nn.Module, site: Site) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise UsageError(f"{type(module).__name__} is no nn.Embedding")
        return VocabularyEmbedding.from_embedding(module, site.group, taken=site.taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head(Kind):
    """The linear layer to the scores of all words, whole, or with `gather_output` false this rank's run of them."""

    gather_output: bool = True

    def convert(self, module: nn.Module, site: Site) -> nn.Module:
        return VocabularyHead.from_linear(module, site.group, gather_output=self.gather_output, taken=site.taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region(Kind):
    """A module around cut layers that stays as it is, but for what it believes of its size.

    `divide` names its whole-numbered attributes to divide by the ranks (`num_heads`). `enter` names the argument of its
    forward that all column layers within take: it enters once for all of them, so nothing else within may use it.
    `dropout`: what it drops before its row layer is of this rank's heads, and dropped apart from the other ranks.
    """

    divide: tuple[str, ...] = ()
    enter: str | None = None
    dropout: bool = False

    def convert(self, module: nn.Module, site: Site) -> nn.Module:
        own = {name: value for name, value in vars(module).items() if type(value) is int}
        for name in self.divide:
            if name not in own:
                close = nearest(name, own)
                raise UsageError(f"Region: {type(module).__name__} has no whole number {name!r} to divide" + (
                    f"; did you mean {close!r}?" if close else ".") + f" It has {', '.join(sorted(own)) or 'none'}")
            setattr(module, name, divided(f"{name} {own[name]}", own[name], site.axis.ranks))
        if self.enter is not None:
            enter_at(module, self.enter, site.axis, site.sequence_dim)
        if self.dropout:
            assert site.streams is not None
            site.streams.attach(module)
        return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Kind):
    """A module that stays as it is on every rank, with all within it that no other pattern matches.

    `follows` names its own parameters that may be tied to cut ones; it must not use them itself.
    """

    follows: tuple[str, ...] = ()

    def convert(self, module: nn.Module, site: Site) -> nn.Module:
        return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Kind):
    """A norm of whole parameters between regions; if `per_head`, of this rank's heads, whether or not sequences are split.

    With `gather_output` the split sequence ends behind it.
    """

    per_head: bool = False
    gather_output: bool = False

    def convert(self, module: nn.Module, site: Site) -> nn.Module:
        if site.sequence_dim is None and not self.per_head:
            return module
        norm = Shared(module, site.group, name=site.path, sequence_dim=None if self.per_head else site.sequence_dim)
        if self.gather_output and site.sequence_dim is not None:
            gather_after(norm, site.axis, site.sequence_dim)
        return norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout(Kind):
    """An `nn.Dropout` between regions."""

    def convert(self, module: nn.Module, site: Site) -> nn.Module:
        if not isinstance(module, nn.Dropout):
            raise UsageError(f"{type(module).__name__} is no nn.Dropout")
        return module if site.sequence_dim is None else PartDropout(
            module.p, module.inplace, group=site.group, name=site.path, sequence_dim=site.sequence_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence(Kind):
    """A module where the split sequence begins or ends: its argument `split` is split, its output gathered."""

    split: str | None = None
    gather_output: bool = False

    def convert(self, module: nn.Module, site: Site) -> nn.Module:
        if site.sequence_dim is not None and self.split is not None:
            split_at(module, self.split, site.axis, site.sequence_dim)
        if site.sequence_dim is not None and self.gather_output:
            gather_after(module, site.axis, site.sequence_dim)
        return module
