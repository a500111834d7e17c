"""The rows of an embedding: who owns them, when they are worth sending one by one, and which of them there are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.log import warn_once

__all__ = ["ROW_COST", "Table", "changed_rows", "summed_duplicates", "whole"]

ROW_COST = 2.5
"""What a byte of a row costs in bytes of the whole: rows are found, sorted, gathered and scattered one by one. Measured at
1 Gbit/s (docs/sparse.md): a slower wire hides more of it, a faster one less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The rows of an embedding over the ranks: rank r owns those from `r * span` on."""

    columns: int
    span: int
    """Rows that a rank owns, padding included."""
    ranks: int

    @property
    def index(self) -> torch.dtype:
        """The dtype of a row's number within its owner's span."""
        return torch.int32 if self.span <= torch.iinfo(torch.int32).max else torch.int64

    def count_by_owner(self, rows: Tensor) -> Tensor:
        """Return how many of the ordered `rows` each rank owns."""
        borders = torch.arange(self.ranks + 1, device=rows.device) * self.span
        return torch.searchsorted(rows, borders).diff()

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row on the wire, with its number."""
        return self.columns * dtype.itemsize + self.index.itemsize

    def prefers_rows(self, busiest: int, dtype: torch.dtype) -> bool:
        """Whether rows are cheaper than the whole, when the busiest rank sends or receives so many."""
        whole = (self.ranks - 1) * self.span * self.columns * dtype.itemsize
        return busiest * self.row_bytes(dtype) * ROW_COST <= whole


def summed_duplicates(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a COO `gradient`, each once and in order, and their values (rows, columns).

    On the host duplicates are added in the order of their occurrence, as the dense gradient of an embedding adds them,
    but 16-bit ones are summed in fp32.
    """
    if gradient.is_coalesced() or gradient.device.type != "cpu":
        gradient = gradient.coalesce()
        return gradient.indices()[0], gradient.values()
    values = gradient._values()  # pyright: ignore[reportPrivateUsage]  the public name coalesces
    rows, place = torch.unique(gradient._indices()[0], return_inverse=True)  # pyright: ignore[reportPrivateUsage]
    return rows, values.new_zeros(len(rows), values.shape[1]).index_add_(0, place, values)


def whole(gradient: Tensor, name: str, *, signed: bool = False) -> Tensor:
    """Return the gradient of the parameter `name`, made dense where it is not; `signed` if signs of it may travel."""
    if not gradient.is_sparse:
        return gradient
    advice = ("travels as signs; rows alone travel where the optimizer does not compress and \"sparse_gradients\" is true"
              if signed else
              "travels whole; set \"sparse_gradients\": true to exchange only the rows that a step touches, if nothing but "
              "embeddings uses the weight")
    warn_once(f"the sparse gradient of '{name}' is made dense, and {advice}")
    rows, values = summed_duplicates(gradient)
    return values.new_zeros(gradient.shape).index_copy_(0, rows, values)


def changed_rows(now: Tensor, before: Tensor) -> Tensor:
    """Return the rows (n, columns) of `now` in which any bit differs from `before`."""
    def words(table: Tensor, width: int) -> Tensor:
        fits = (word for word in (torch.int64, torch.int32, torch.int16)
                if table.shape[1] * width % word.itemsize == 0 and table.storage_offset() * width % word.itemsize == 0)
        return table.view(next(fits, torch.uint8))

    width = now.element_size()
    different = torch.ne(words(now, width), words(before, width))
    if different.shape[1] % torch.int64.itemsize == 0:  # eight answers at once
        different = different.view(torch.int64)
    return different.any(1).nonzero().flatten()
