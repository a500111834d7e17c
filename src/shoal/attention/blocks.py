"""The blocks that a layout visits, as compressed rows.

A layout is a tensor (heads, query blocks, key blocks) of 0 and 1. Where all heads have one layout, one head is stored.
Blocks are cached by the content of the layout, not by its length: two layouts of one length never share an entry. The layout
itself is not kept: it has a byte for each block, visited or not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from shoal.attention.arguments import check_tensor, whole_number
from shoal.errors import UsageError

__all__ = ["Blocks", "outside_graphs"]

P = ParamSpec("P")
T = TypeVar("T")

_CACHED = 64


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Let torch.compile end its graph before `function`, which reads the values of a layout."""
    return cast("Callable[P, T]", torch.compiler.disable(
        function, reason="layouts of block-sparse attention are made outside graphs of torch.compile; call the module once "
                         "without it, or ask for the blocks before"))


def _is_binary(layout: Tensor, visited: Tensor) -> bool:
    """Return whether all entries of `layout` are 0 or 1; `visited` are those that are not 0."""
    if layout.dtype == torch.bool:
        return True
    if layout.is_floating_point():
        return torch.equal(visited.to(layout.dtype), layout)
    least, most = layout.aminmax()  # without the copy that a comparison with `visited` needs
    return bool(least >= 0) and bool(most <= 1)


class Blocks:
    """The visited blocks of each row of blocks, in ascending order: `columns[starts[row]:starts[row + 1]]`.

    Rows of all heads follow each other; `heads` is 1 where they share one layout. `starts` (heads * row_blocks + 1,) is
    int64, `columns` (visited,) int32; both are on the host. `block` is the number of positions along an edge.

    A part of a whole layout has `row_places` (heads * row_blocks,) and `column_places` (visited,), both int32: the numbers
    that its rows and the columns of its visited blocks have in the whole. Causal masks, dropout and terms go by them.
    """

    def __init__(self, layout: Tensor, block: int, *, row_places: Tensor | None = None,
                 column_places: Tensor | None = None) -> None:
        """Take a checked `layout` (heads, row blocks, column blocks) on the host; use `Blocks.of`.

        For a part give the numbers in the whole of its rows (heads, row blocks) and of its columns (heads, column blocks).
        """
        self.heads, self.row_blocks, self.column_blocks = layout.shape
        self.block = block
        found = layout.flatten(0, 1).nonzero()
        counts = torch.bincount(found[:, 0], minlength=self.heads * self.row_blocks)
        self.starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self.columns = found[:, 1].to(torch.int32)
        self.rows = found[:, 0].contiguous()
        """The row of blocks of each visited block, counted over all stored heads: (visited,) int64."""
        self.row_places = None if row_places is None else row_places.flatten().to(torch.int32)
        self.column_places = None
        if column_places is not None:
            self.column_places = column_places[found[:, 0] // self.row_blocks, found[:, 1]].to(torch.int32)

    @staticmethod
    @outside_graphs
    def of(layout: Tensor, block: int) -> Blocks:
        """Return the blocks of `layout` (heads, query blocks, key blocks), whose entries are 0 or 1.

        Raises UsageError for another shape, other entries, or a block of no positions.
        """
        check_tensor("a layout", layout, "(heads, query blocks, key blocks)")
        if layout.dim() != 3 or not layout.numel():
            raise UsageError("a layout has the shape (heads, query blocks, key blocks), each at least 1; "
                             f"got {tuple(layout.shape)}")
        if layout.is_meta or layout.is_complex():
            raise UsageError(f"a layout has entries 0 and 1 alone (1: the block is visited); got {layout.dtype} on "
                             f"{layout.device}: give bool or whole numbers, on a device that stores them")
        block = whole_number("a block", block, "a whole number of positions, at least one", least=1)
        layout = layout.detach().cpu()
        if layout.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has few operators of them
            layout = layout.to(torch.int64)
        small = layout.to(torch.bool)
        if not _is_binary(layout, small):
            raise UsageError("a layout has entries 0 and 1 alone (1: the block is visited); "
                             f"got values from {layout.min().item()} to {layout.max().item()}")
        if layout.shape[0] > 1 and bool((small == small[:1]).all()):
            small = small[:1]
        return _of_content(_LayoutKey(small, block))

    @staticmethod
    def dense(length: int, kv_length: int, block: int) -> Blocks:
        """Return the layout of ones. Raises UsageError for lengths that are no multiples of `block`."""
        block = whole_number("a block", block, "a whole number of positions, at least one", least=1)
        for each in (length, kv_length):
            if whole_number("a length", each, "a whole number of positions, at least one block", least=block) % block:
                raise UsageError(f"a length is a multiple of the block, {block}; got {each}: pad it by {-each % block}")
        return Blocks.of(torch.ones(1, length // block, kv_length // block, dtype=torch.bool, device="cpu"), block)

    @property
    def length(self) -> int:
        """The number of queries."""
        return self.row_blocks * self.block

    @property
    def kv_length(self) -> int:
        """The number of keys."""
        return self.column_blocks * self.block

    @property
    def visited(self) -> int:
        """The number of visited blocks, of all stored heads."""
        return self.columns.numel()

    @property
    def density(self) -> float:
        """The share of all blocks that is visited."""
        return self.visited / (self.heads * self.row_blocks * self.column_blocks)

    @property
    def layout(self) -> Tensor:
        """The layout (heads, query blocks, key blocks) of bool, made anew: its memory is a byte for each block."""
        layout = torch.zeros(self.heads, self.row_blocks, self.column_blocks, dtype=torch.bool, device="cpu")
        layout.flatten(0, 1)[self.rows, self.columns.long()] = True  # operators that a graph of torch.compile can have
        return layout

    def layout_of_rows(self, rows: range) -> Tensor:
        """Return some rows of blocks of `layout`: (heads, rows, key blocks) bool."""
        layout = torch.zeros(self.heads, len(rows), self.column_blocks, dtype=torch.bool, device="cpu")
        firsts = range(rows.start, self.heads * self.row_blocks, self.row_blocks)
        ends = [(int(self.starts[first]), int(self.starts[first + len(rows)])) for first in firsts]
        columns = torch.cat([self.columns[begin:end] for begin, end in ends])
        counts = self.starts.diff().view(self.heads, -1)[:, rows.start:rows.stop].flatten()
        numbers = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
        layout.flatten(0, 1)[numbers, columns.long()] = True
        return layout

    @cached_property
    def row_positions(self) -> Tensor:
        """The position in the whole sequence of each query: (heads, length) int64."""
        return self.positions_of_rows()

    def positions_of_rows(self) -> Tensor:
        """Return `row_positions`, computed anew: what a trace computes may not stay in a cache."""
        numbers = (torch.arange(self.row_blocks, device="cpu").repeat(self.heads) if self.row_places is None else
                   self.row_places.long())
        return (numbers.view(self.heads, -1, 1) * self.block + torch.arange(self.block, device="cpu")).flatten(1)

    @cached_property
    def lower(self) -> Blocks:
        """The same layout without blocks above the diagonal of the whole, which a causal mask hides wholly."""
        if self.row_places is None:
            return Blocks.of(self.layout.tril(), self.block)
        kept = (self.columns if self.column_places is None else self.column_places) <= self.row_places[self.rows]
        if bool(kept.all()):
            return self
        layout = torch.zeros(self.heads, self.row_blocks, self.column_blocks, dtype=torch.bool, device="cpu")
        layout.flatten(0, 1)[self.rows[kept], self.columns[kept].long()] = True
        lower = Blocks(layout, self.block, row_places=self.row_places)
        lower.column_places = None if self.column_places is None else self.column_places[kept]
        return lower

    def part(self, rows: range, columns: range) -> Blocks:
        """Return some rows and columns of blocks, made once. The first of the columns counts as the first of the whole.

        So two parts with the same columns share the places of keys, and a causal mask hides in both what it hides here.
        """
        whole = len(rows) == self.row_blocks and len(columns) == self.column_blocks
        return self if whole else _part(self, rows, columns)

    @cached_property
    def digest(self) -> str:
        """A few characters that tell layouts apart, equal on every rank that has this one."""
        made = blake2b(repr((self.heads, self.row_blocks, self.column_blocks, self.block)).encode(), digest_size=6)
        for part in (self.starts, self.columns):
            made.update(part.numpy().data)
        return made.hexdigest()

    def of_heads(self, heads: range) -> Blocks:
        """Return the layout of some of the heads."""
        if self.heads == 1:
            return self
        return Blocks.of(self.layout[heads.start:heads.stop], self.block)

    def __repr__(self) -> str:
        return (f"Blocks({self.heads} heads, {self.length} x {self.kv_length}, block {self.block}, {self.visited} visited: "
                f"{self.density:.1%})")


class _LayoutKey:
    """A layout of bool as the key of a cache, equal to one of the same shape, block and content.

    A cache keeps its keys: the layout goes to whoever takes it.
    """

    def __init__(self, layout: Tensor, block: int) -> None:
        self.block = block
        self._layout: Tensor | None = layout
        self._identity = tuple(layout.shape), block, blake2b(layout.contiguous().numpy().data, digest_size=32).digest()

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LayoutKey) and self._identity == other._identity

    def take(self) -> Tensor:
        """Return the layout, once."""
        layout, self._layout = self._layout, None
        assert layout is not None
        return layout


@lru_cache(maxsize=_CACHED)
def _of_content(key: _LayoutKey) -> Blocks:
    return Blocks(key.take(), key.block)


@lru_cache(maxsize=_CACHED)
def _part(blocks: Blocks, rows: range, columns: range) -> Blocks:
    places = torch.arange(rows.start, rows.stop, device="cpu") - columns.start
    layout = blocks.layout_of_rows(rows)[..., columns.start:columns.stop].contiguous()
    return Blocks(layout, blocks.block, row_places=places.repeat(blocks.heads))
