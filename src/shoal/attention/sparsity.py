"""A sparsity configuration is a rule that gives the layout of any length.

    config.make_layout(length)   (heads, blocks, blocks) int64 of 0 and 1; row: block of queries, column: block of keys
    config.blocks(length)        the same as `Blocks`, for `attend`; of a model that sees no later keys with `causal=True`

A layout follows from the values of its configuration alone. Random columns come from a generator that is seeded by these
values but for the number of heads, the head and the row: every rank draws the same ones without communication, and again
after a restart, and a rank that has some of the heads draws the layout that all of them share. `with_seed` gives other ones.

An unidirectional layout leaves out blocks of later keys, but not later keys within a block: `attend(causal=True)` does. The
published structures are in `structures.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from numbers import Integral
from typing import Any, Self, cast

import torch
from torch import Tensor

from shoal.attention.arguments import check_tensor, true_or_false
from shoal.attention.blocks import Blocks, outside_graphs
from shoal.errors import ConfigError, NotServed, UsageError

__all__ = ["SparsityConfig", "TensorSparsityConfig", "text_of"]


class SparsityConfig:
    """The base of all structures. Subclass it and implement `make_layout` for a custom structure.

    `block` is the number of positions along an edge of a block. With `different_layout_per_head` heads may differ, else all
    have the layout of the first. Raises ConfigError (a ValueError) for numbers below 1.
    """

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False):
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = self._true_or_false(different_layout_per_head=different_layout_per_head)
        self.seed = 0
        self._at_least(1, num_heads=num_heads, block=block)

    def with_seed(self, seed: int) -> Self:
        """Let random columns be those of `seed`, in place of 0; return this configuration."""
        self._at_least(0, seed=seed)
        self.seed = seed
        return self

    @property
    def num_layout_heads(self) -> int:
        """The number of heads whose layouts may differ."""
        return self.num_heads if self.different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> Tensor:
        """Return the layout that visits nothing: zeros (heads, blocks, blocks).

        Raises ConfigError for a length that is no multiple of the block.
        """
        blocks = self._count(seq_len)
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64, device="cpu")

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the layout (heads, blocks, blocks) of `seq_len` positions.

        Raises ConfigError for a length that the structure cannot have, NotServed in this class, which has no structure.
        """
        raise NotServed(f"{self._name} has no structure of its own; take one of its subclasses, such as "
                        f"FixedSparsityConfig, or write a subclass with make_layout(seq_len)")

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copy the layout of the first head to all others, unless they may differ; return `layout`."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1]
        return layout

    @outside_graphs
    def blocks(self, seq_len: int, *, causal: bool = False) -> Blocks:
        """Return the visited blocks of `seq_len` positions: one object for one layout.

        With `causal`, for a model that sees no later keys, a row draws its random columns among those up to its own: none
        is drawn in vain, and what a row sees does not change as the sequence grows. A `make_layout` of one's own is taken
        as it is, and called each time: it may depend on anything.
        """
        return Blocks.of(self._checked(self.make_layout(seq_len), seq_len), self.block)

    def layout_of_heads(self, seq_len: int) -> Tensor:
        """Return `make_layout(seq_len)` for `num_heads` heads. Raises UsageError where that is no layout of this length."""
        layout = self._checked(self.make_layout(seq_len), seq_len)
        Blocks.of(layout, self.block)  # raises for what is no layout
        return layout.expand(self.num_heads, -1, -1).contiguous()

    def check_rows(self) -> None:
        """Raise ConfigError for values that no length can have."""

    def _checked(self, layout: Tensor, seq_len: int) -> Tensor:
        count = self._count(seq_len)
        check_tensor(f"{self._name}: the result of make_layout({seq_len})", layout,
                     f"(heads, blocks, blocks), here ({self.num_heads}, {count}, {count})")
        if layout.dim() == 3 and (layout.shape[0] not in (1, self.num_heads) or layout.shape[1:] != (count, count)):
            raise UsageError(f"{self._name}: make_layout({seq_len}) returned {tuple(layout.shape)}; return (heads, blocks, "
                             f"blocks), here ({self.num_heads}, {count}, {count}), as setup_layout({seq_len}) does")
        return layout

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _describe(self, names: Set[str]) -> str:
        values = (f"{name}={text_of(value)}" for name, value in sorted(vars(self).items())
                  if name in names and name[0] != "_")
        return f"{self._name}({', '.join(values)})"

    def __repr__(self) -> str:
        return self._describe(vars(self).keys())

    def _count(self, seq_len: int) -> int:
        """Return the number of blocks in a row."""
        if isinstance(seq_len, bool) or not isinstance(seq_len, Integral):
            raise ConfigError(f"{self._name}: got length {seq_len!r}; give a whole number of positions, a multiple of the "
                              f"block, {self.block}")
        seq_len = int(seq_len)
        if seq_len < 1 or seq_len % self.block:
            padded = -(-max(seq_len, 1) // self.block) * self.block
            raise ConfigError(f"{self._name}: got length {seq_len}, which is no multiple of the block, {self.block}; pad "
                              f"the sequence to {padded} (SparseAttentionUtils.pad_to_block_size)")
        return seq_len // self.block

    def _at_least(self, least: int, **numbers: int) -> None:
        for name, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
                raise ConfigError(f"{self._name}: {name}: got {number!r}; give a whole number from {least}")

    def _true_or_false(self, **values: object) -> bool:
        """Return one named value, true or false. Raises ConfigError for others, such as text, which counts as true."""
        (name, given), = values.items()
        return true_or_false(f"{self._name}: {name}", given, error=ConfigError)

    def _listed(self, **values: Any) -> list[int]:
        """Return one named sequence of numbers as a list."""
        (name, given), = values.items()
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ConfigError(f"{self._name}: {name}: got {given!r}; give a list of whole numbers, such as [{given}]")
        return list(given)

    def _needed(self) -> dict[str, int]:
        """Return the values that may not exceed the number of blocks in a row, by their names."""
        return {}

    @property
    def shortest(self) -> int:
        """The least number of positions that the structure can have."""
        return self.block * max([1, *self._needed().values()])

    def _check_row(self, blocks: int) -> None:
        for name, number in self._needed().items():
            if number > blocks:
                raise ConfigError(f"{self._name}: {name}: got {number}, a row has only {blocks} blocks of {self.block}: "
                                  f"give a longer sequence, smaller blocks, or at most {blocks}")

    def _check_attention(self, attention: str, *, horizontal: bool = False) -> None:
        if attention not in ("unidirectional", "bidirectional"):
            raise NotServed(f"{self._name}: attention: got {attention!r}; choose 'unidirectional' or 'bidirectional'")
        if horizontal and attention == "unidirectional":
            raise ConfigError(f"{self._name}: horizontal_global_attention: got true beside attention 'unidirectional', "
                              f"whose rows see no later blocks; set it to false, or attention to 'bidirectional'")


def text_of(value: object) -> str:
    """Return the text of a value, alike for numbers of one size."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, cast('Sequence[object]', value)))}]"
    return repr(int(value)) if not isinstance(value, bool) and isinstance(value, Integral) else repr(value)


class TensorSparsityConfig(SparsityConfig):
    """A layout that is given as a tensor (heads, blocks, blocks) of 0 and 1, for one length."""

    def __init__(self, layout: Tensor, block: int = 16):
        check_tensor("TensorSparsityConfig: layout", layout, "(heads, blocks, blocks)")
        if layout.dim() != 3 or layout.shape[1] != layout.shape[2]:
            raise ConfigError("TensorSparsityConfig: a layout of self-attention is (heads, blocks, blocks); "
                              f"got {tuple(layout.shape)}")
        self.layout = Blocks.of(layout, block).layout.expand(layout.shape[0], -1, -1).to(torch.int64)
        self._found: tuple[Tensor, int, tuple[int, int], Blocks] | None = None
        """The tensor and its version, the block and the length, and the blocks that were made of them last."""
        super().__init__(layout.shape[0], block, different_layout_per_head=True)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_found": None}  # blocks are made again where they are needed

    def blocks(self, seq_len: int, *, causal: bool = False) -> Blocks:
        """Return the visited blocks as in `SparsityConfig`, made once for the tensor's present values."""
        if type(self).make_layout is not TensorSparsityConfig.make_layout or self.layout.is_inference():
            return super().blocks(seq_len, causal=causal)
        now = self.layout._version, (self.block, seq_len)
        if self._found is None or self._found[0] is not self.layout or self._found[1:3] != now:
            self._found = self.layout, *now, super().blocks(seq_len, causal=causal)
        return self._found[3]

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the tensor. Raises ConfigError for another length than its own."""
        if self._count(seq_len) != self.layout.shape[1]:
            raise ConfigError(f"TensorSparsityConfig: got length {seq_len}, the layout is for "
                              f"{self.layout.shape[1] * self.block}; give a layout of that length, or a rule")
        return self.layout.clone()
