"""The published structures: rules that give the visited blocks of any length.

Each says which blocks a row of blocks visits: a window around itself, global columns, random ones. The base draws the random
ones and keeps the blocks of recent lengths. What a configuration promises is in `sparsity.py`.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shoal.attention.blocks import Blocks, outside_graphs
from shoal.attention.sparsity import SparsityConfig, text_of
from shoal.errors import ConfigError

__all__ = ["BSLongformerSparsityConfig", "BigBirdSparsityConfig", "DenseSparsityConfig", "FixedSparsityConfig",
           "LocalSlidingWindowSparsityConfig", "VariableSparsityConfig"]

_KNOWN = 64
"""Lengths whose blocks a configuration keeps."""


class _Structure(SparsityConfig):
    """A structure with a rule for any number of blocks."""

    attention = "bidirectional"
    num_random_blocks = 0

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False):
        super().__init__(num_heads, block, different_layout_per_head)
        self._known: dict[Hashable, Blocks] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_known": {}}  # blocks are drawn again where they are needed

    @abstractmethod
    def _visited(self, blocks: int) -> Tensor:
        """Return which blocks are visited, but for random ones: (heads whose layouts may differ, blocks, blocks) bool."""

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the layout (heads, blocks, blocks) of `seq_len` positions."""
        return self._structure(seq_len, causal=False).to(torch.int64).expand(self.num_heads, -1, -1).contiguous()

    def blocks(self, seq_len: int, *, causal: bool = False) -> Blocks:
        """Return the visited blocks as in `SparsityConfig`, drawn once for a length and the values of this object."""
        if type(self).make_layout is not _Structure.make_layout:
            return super().blocks(seq_len, causal=causal)
        values = (_identity(value) for name, value in sorted(vars(self).items()) if name[0] != "_")
        key = (*values, seq_len, causal)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()  # in one operation: other threads may look up meanwhile
            found = self._known[key] = self._drawn(seq_len, causal=causal)
        return found

    @outside_graphs
    def _drawn(self, seq_len: int, *, causal: bool) -> Blocks:
        return Blocks.of(self._structure(seq_len, causal=causal), self.block)

    def _structure(self, seq_len: int, *, causal: bool) -> Tensor:
        blocks = self._count(seq_len)
        self._check_row(blocks)
        layout = self._visited(blocks)
        self._draw(layout, self.num_random_blocks, lower=causal or self.attention == "unidirectional")
        return layout

    def _nothing(self, blocks: int) -> Tensor:
        return torch.zeros(self.num_layout_heads, blocks, blocks, dtype=torch.bool, device="cpu")

    def _draw(self, layout: Tensor, count: int, *, lower: bool) -> None:
        """Set `count` random columns of each row, with `lower` none after the row's own."""
        if not count:
            return
        values = self._describe(vars(self).keys() - {"num_heads"})
        for head, of_head in enumerate(layout):
            for row, of_row in enumerate(of_head):
                choice = range(row + 1 if lower else len(of_row))
                generator = random.Random(f"{values} head {head} row {row}")
                of_row[generator.sample(choice, min(count, len(choice)))] = True


class DenseSparsityConfig(_Structure):
    """Every block is visited: dense attention as a layout."""

    def _visited(self, blocks: int) -> Tensor:
        return self._nothing(blocks).fill_(True)


class FixedSparsityConfig(_Structure):
    """Windows of blocks that see each other, and the last blocks of each window, which every row sees.

    A row is cut into windows of `num_local_blocks`. Of each window, `num_global_blocks` columns are global: the last ones
    for head 0, those before for head 1, and so on over `num_different_global_patterns`. All rows see them, or with
    attention 'unidirectional' the rows from the first of them on; with `horizontal_global_attention` their rows see
    everything.
    (Child et al. 2019, "Generating Long Sequences with Sparse Transformers", the fixed pattern.)
    """

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, num_local_blocks: int = 4,
                 num_global_blocks: int = 1, attention: str = "bidirectional", horizontal_global_attention: bool = False,
                 num_different_global_patterns: int = 1):
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_local_blocks, self.num_global_blocks = num_local_blocks, num_global_blocks
        self.attention = attention
        self.horizontal_global_attention = self._true_or_false(horizontal_global_attention=horizontal_global_attention)
        self.num_different_global_patterns = num_different_global_patterns
        self._at_least(1, num_local_blocks=num_local_blocks, num_global_blocks=num_global_blocks,
                       num_different_global_patterns=num_different_global_patterns)
        if num_local_blocks % num_global_blocks:
            raise ConfigError(f"{self._name}: num_local_blocks: got {num_local_blocks}, no multiple of num_global_blocks, "
                              f"{num_global_blocks}; give {num_global_blocks * -(-num_local_blocks // num_global_blocks)}")
        self._check_attention(attention, horizontal=horizontal_global_attention)
        patterns = num_local_blocks // num_global_blocks
        if num_different_global_patterns > 1 and not different_layout_per_head:
            raise ConfigError(f"{self._name}: num_different_global_patterns: got {num_different_global_patterns} with one "
                              f"layout for all heads; set different_layout_per_head to true")
        if num_different_global_patterns > patterns:
            raise ConfigError(f"{self._name}: num_different_global_patterns: got {num_different_global_patterns}; a window "
                              f"of {num_local_blocks} blocks has {patterns} groups of {num_global_blocks}: give at most "
                              f"{patterns}")

    def _needed(self) -> dict[str, int]:
        return {"num_global_blocks": self.num_global_blocks}

    def _visited(self, blocks: int) -> Tensor:
        layout = self._nothing(blocks)
        lower = self.attention == "unidirectional"
        window = torch.arange(blocks, device="cpu") // self.num_local_blocks
        local = window[:, None] == window
        layout |= local.tril() if lower else local
        for head, of_head in enumerate(layout):
            for start in self._global_starts(head, blocks):
                columns = slice(start, start + self.num_global_blocks)
                of_head[start if lower else 0:, columns] = True
                if self.horizontal_global_attention:
                    of_head[columns] = True
        return layout

    def _global_starts(self, head: int, blocks: int) -> Iterator[int]:
        """Yield the first global column of each window; in a last window that is cut short it is moved to the left."""
        offset = self.num_local_blocks - (1 + head % self.num_different_global_patterns) * self.num_global_blocks
        for window in range(0, blocks, self.num_local_blocks):
            yield min(window + offset, blocks - self.num_global_blocks)


class _Ranges(_Structure):
    """A structure with global blocks that are given by index, or by ranges [start, end)."""

    global_block_indices: Sequence[int]
    global_block_end_indices: Sequence[int] | None

    def _set_ranges(self, indices: Sequence[int], ends: Sequence[int] | None) -> None:
        self.global_block_indices = self._listed(global_block_indices=indices)
        self.global_block_end_indices = None if ends is None else self._listed(global_block_end_indices=ends)
        starts = self.global_block_indices
        for start in starts:
            self._at_least(0, global_block_indices=start)
        if self.global_block_end_indices is None:
            return
        if len(self.global_block_end_indices) != len(starts):
            raise ConfigError(f"{self._name}: global_block_end_indices: got {len(self.global_block_end_indices)} ends for "
                              f"{len(starts)} starts in global_block_indices; give one end for each start")
        for start, end in zip(starts, self.global_block_end_indices, strict=True):
            self._at_least(0, global_block_end_indices=end)
            if start >= end:
                raise ConfigError(f"{self._name}: global_block_end_indices: got end {end} for start {start}; an end lies "
                                  f"after its start: give at least {start + 1}")

    def _global_slices(self, blocks: int) -> Iterator[slice]:
        """Yield the global columns that a row of `blocks` has."""
        starts = self.global_block_indices
        for start, end in zip(starts, self.global_block_end_indices or [start + 1 for start in starts], strict=True):
            if start < blocks:
                yield slice(start, min(end, blocks))


class VariableSparsityConfig(_Ranges):
    """Windows of different sizes, random blocks, and global blocks anywhere.

    `local_window_blocks` are the sizes of the windows in turn, of which the last repeats. `global_block_indices` are global
    columns, or with `global_block_end_indices` the starts of ranges; those past the end are left out. All rows see them, or
    with attention 'unidirectional' the rows from the start on; with `horizontal_global_attention` their rows see everything.
    Each row sees `num_random_blocks` random columns: with 'unidirectional' no later ones, and fewer where there are fewer.
    """

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, num_random_blocks: int = 0,
                 local_window_blocks: Sequence[int] = (4,), global_block_indices: Sequence[int] = (0,),
                 global_block_end_indices: Sequence[int] | None = None, attention: str = "bidirectional",
                 horizontal_global_attention: bool = False):
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = num_random_blocks
        self.local_window_blocks = self._listed(local_window_blocks=local_window_blocks)
        self.attention = attention
        self.horizontal_global_attention = self._true_or_false(horizontal_global_attention=horizontal_global_attention)
        self._at_least(0, num_random_blocks=num_random_blocks)
        if not self.local_window_blocks:
            raise ConfigError(f"{self._name}: local_window_blocks: got no sizes; give at least one, such as [4]")
        for size in self.local_window_blocks:
            self._at_least(1, local_window_blocks=size)
        self._set_ranges(global_block_indices, global_block_end_indices)
        self._check_attention(attention, horizontal=horizontal_global_attention)

    def _needed(self) -> dict[str, int]:
        return {"num_random_blocks": self.num_random_blocks}

    def _visited(self, blocks: int) -> Tensor:
        layout = self._nothing(blocks)
        lower = self.attention == "unidirectional"
        for start, end in self._windows(blocks):
            inside = torch.ones(end - start, end - start, dtype=torch.bool, device="cpu")
            layout[:, start:end, start:end] |= inside.tril() if lower else inside
        for columns in self._global_slices(blocks):
            layout[:, columns.start if lower else 0:, columns] = True
            if self.horizontal_global_attention:
                layout[:, columns] = True
        return layout

    def _windows(self, blocks: int) -> Iterator[tuple[int, int]]:
        start = 0
        while start < blocks:
            for size in self.local_window_blocks if not start else self.local_window_blocks[-1:]:
                if start < blocks:
                    yield start, min(start + size, blocks)
                start += size


class BigBirdSparsityConfig(_Structure):
    """A sliding window, random blocks, and the first blocks, which see everything and are seen by all.

    A row sees `num_sliding_window_blocks` around itself, `num_random_blocks` random columns and the first
    `num_global_blocks`, whose rows see everything. Attention 'unidirectional' keeps the lower triangle of this, and draws
    from it: there the first row has one column to draw. (Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences".)
    """

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, num_random_blocks: int = 1,
                 num_sliding_window_blocks: int = 3, num_global_blocks: int = 1, attention: str = "bidirectional"):
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = num_random_blocks
        self.num_sliding_window_blocks, self.num_global_blocks = num_sliding_window_blocks, num_global_blocks
        self.attention = attention
        self._at_least(0, num_random_blocks=num_random_blocks, num_global_blocks=num_global_blocks)
        self._at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        self._check_attention(attention)

    def check_rows(self) -> None:
        if self.attention == "unidirectional" and self.num_random_blocks > 1:
            raise ConfigError(f"{self._name}: num_random_blocks: got {self.num_random_blocks} beside attention "
                              f"'unidirectional', whose first row has one block to draw from; give 0 or 1")

    def _needed(self) -> dict[str, int]:
        return {"num_random_blocks": self.num_random_blocks, "num_global_blocks": self.num_global_blocks,
                "num_sliding_window_blocks": self.num_sliding_window_blocks}

    def _visited(self, blocks: int) -> Tensor:
        lower = self.attention == "unidirectional"
        self.check_rows()
        layout = self._nothing(blocks) | _window(blocks, self.num_sliding_window_blocks)
        layout[:, :self.num_global_blocks] = True
        layout[:, :, :self.num_global_blocks] = True
        return layout.tril() if lower else layout


class BSLongformerSparsityConfig(_Ranges):
    """A sliding window, and global blocks anywhere, which see everything and are seen by all.

    `global_block_indices` are the global blocks, or with `global_block_end_indices` the starts of ranges; those past the end
    are left out. Attention 'unidirectional' keeps the lower triangle. (Beltagy et al. 2020, "Longformer", in blocks.)
    """

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False,
                 num_sliding_window_blocks: int = 3, global_block_indices: Sequence[int] = (0,),
                 global_block_end_indices: Sequence[int] | None = None, attention: str = "bidirectional"):
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_sliding_window_blocks, self.attention = num_sliding_window_blocks, attention
        self._at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        self._set_ranges(global_block_indices, global_block_end_indices)
        self._check_attention(attention)

    def _needed(self) -> dict[str, int]:
        return {"num_sliding_window_blocks": self.num_sliding_window_blocks}

    def _visited(self, blocks: int) -> Tensor:
        layout = self._nothing(blocks) | _window(blocks, self.num_sliding_window_blocks)
        for columns in self._global_slices(blocks):
            layout[:, columns] = True
            layout[:, :, columns] = True
        return layout.tril() if self.attention == "unidirectional" else layout


class LocalSlidingWindowSparsityConfig(_Structure):
    """A sliding window alone: floor(w / 2) blocks before the own one, and with 'bidirectional' as many after it."""

    def __init__(self, num_heads: int, block: int = 16, num_sliding_window_blocks: int = 3,
                 attention: str = "unidirectional"):
        super().__init__(num_heads, block)
        self.num_sliding_window_blocks, self.attention = num_sliding_window_blocks, attention
        self._at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        self._check_attention(attention)

    def _needed(self) -> dict[str, int]:
        return {"num_sliding_window_blocks": self.num_sliding_window_blocks}

    def _visited(self, blocks: int) -> Tensor:
        window = _window(blocks, self.num_sliding_window_blocks)[None]
        return window.tril() if self.attention == "unidirectional" else window


def _window(blocks: int, size: int) -> Tensor:
    """Return the blocks (blocks, blocks) that lie at most floor(size / 2) from the diagonal."""
    return torch.ones(blocks, blocks, dtype=torch.bool, device="cpu").tril_(size // 2).triu_(-(size // 2))


def _identity(value: object) -> Hashable:
    """Return the whole content of a value."""
    if isinstance(value, Tensor | np.ndarray):
        value = cast("Any", value).tolist()
    return tuple(map(_identity, cast("Sequence[object]", value))) if isinstance(value, list | tuple) else text_of(value)
