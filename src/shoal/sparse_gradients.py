"""How an embedding travels when a step touches few of its rows: by these rows alone, to the rank that owns them.

    reduce       each rank sends its rows to their owners, which sum them in rank order     in place of a reduce-scatter
    replicate    each owner sends the rows that were summed to all                          in place of an all-gather
    publish      each owner sends the rows whose weights have changed since the last time   in place of an all-gather

The gradient of a row that nobody sends is zero, and a sum of zeros and addends is the sum of the addends: the bits are
those of the dense way. Each exchange begins with the numbers of rows, which all ranks see, so that all choose alike
between rows and the whole: rows where those of the busiest rank are fewer bytes, at `ROW_COST`, than the whole's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.collectives import Communicator, Handle, Label
from shoal.log import warn_once

__all__ = ["ROW_COST", "Rows", "Table", "changed_rows", "summed_duplicates", "whole"]

ROW_COST = 1.5
"""What a byte of a row costs in bytes of the whole: rows are found, sorted, gathered and scattered one by one. Measured
between ranks of one machine, where the wire hides none of it: docs/sparse.md."""

MOST_SKIPPED = 15
"""Publications without a comparison, at most, after one that found nearly every row changed."""


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


def whole(gradient: Tensor, name: str) -> Tensor:
    """Return the gradient of the parameter `name`, made dense where it is not."""
    if not gradient.is_sparse:
        return gradient
    warn_once(f"the sparse gradient of '{name}' is made dense, and travels whole; set \"sparse_gradients\": true to "
              f"exchange only the rows that a step touches, if nothing but embeddings uses the weight")
    rows, values = summed_duplicates(gradient)
    return values.new_zeros(gradient.shape).index_copy_(0, rows, values)


class Rows:
    """The rows of one embedding on one rank: those collected for the next reduction, and what moves them."""

    def __init__(self, communicator: Communicator, size: int, columns: int, accumulate: torch.dtype, wire: torch.dtype,
                 device: torch.device, *, unit: str, index: int):
        """The embedding has `columns` columns, and `size` elements, padding included."""
        self.table = table = Table(columns=columns, span=size // columns // communicator.ranks, ranks=communicator.ranks)
        self._communicator = communicator
        self._own = communicator.rank * table.span
        self._accumulate, self._wire, self._device = accumulate, wire, device
        self._labels = {kind: Label(kind=kind, unit=unit, index=index) for kind in Label.KINDS}
        self._unit = unit
        self._counting = f"counting rows of unit '{unit}'"
        self._rows: Tensor | None = None
        """The rows collected, each once and in order; None: nothing is."""
        self._values: Tensor | None = None
        self._counts: list[list[int]] = []
        """Rows that each rank sends to each other, of the reduction under way."""
        self.summed: Tensor | None = None
        """The rows of this rank's span that the last reduction gave a sum."""
        self._published: Tensor | None = None
        """This rank's span as the others have it; None: it was not kept."""
        self._skip = self._skipped = 0  # publications until the next comparison, and as many were left out before the last

    @property
    def collected(self) -> bool:
        """Whether rows wait to be reduced."""
        return self._rows is not None

    def collect(self, gradient: Tensor, factor: float) -> None:
        """Add a COO `gradient` times `factor`, with the arithmetic that a dense one would see."""
        rows, values = summed_duplicates(gradient)
        if self._rows is None or self._values is None:
            if values.dtype == self._accumulate:
                values = values if factor == 1 else values * factor
            else:
                values = values.to(self._accumulate).mul_(factor)
            self._rows, self._values = rows, values
            return
        both, place = torch.unique(torch.cat((self._rows, rows)), return_inverse=True)
        before, now = place.split((len(self._rows), len(rows)))
        merged = self._values.new_zeros(len(both), self.table.columns).index_copy_(0, before, self._values)
        self._values = merged.index_copy_(0, now, merged[now].add_(values, alpha=factor))
        self._rows = both

    def spill(self, view: Tensor, *, onto: bool) -> None:
        """Write what was collected into the dense `view` (rows, columns), `onto` what it holds, and forget it."""
        if not onto:
            view.zero_()
        view.index_add_(0, *self._taken())

    def _taken(self) -> tuple[Tensor, Tensor]:
        """Return the rows and values that were collected, and forget them."""
        rows, values = self._rows, self._values
        self.forget()
        if rows is None or values is None:
            none = torch.empty((0, self.table.columns), dtype=self._accumulate, device=self._device)
            return torch.empty(0, dtype=torch.int64, device=self._device), none
        return rows, values

    def forget(self) -> None:
        """Drop what was collected."""
        self._rows = self._values = None

    def agree(self, *, dense: bool) -> bool:
        """Return, on all ranks alike, whether the collected rows are to be sent; `dense`: this rank has a whole gradient."""
        if dense:
            warn_once(f"sparse_gradients: the gradient of unit '{self._unit}' is dense, for something beside the embedding "
                      f"used its weight (a head that is tied to it?): it travels whole")
        if self.table.ranks == 1:
            return not dense
        counts = torch.full((self.table.ranks,), -1, dtype=torch.int64, device=self._device)
        if not dense:
            borders = torch.arange(self.table.ranks + 1, device=self._device) * self.table.span
            counts = torch.searchsorted(borders[:0] if self._rows is None else self._rows, borders).diff()
        self._counts = self._communicator.gather_words(counts, self._counting).tolist()
        if any(row[0] < 0 for row in self._counts):
            return False
        ranks = range(self.table.ranks)
        busiest = max(max(sum(self._counts[rank][other] for other in ranks if other != rank),
                          sum(self._counts[other][rank] for other in ranks if other != rank)) for rank in ranks)
        return self.table.prefers_rows(busiest, self._wire)

    def reduce(self, own: Tensor, *, scale: float, accumulate: bool) -> Handle:
        """Sum the collected rows of all ranks, times `scale`, into this rank's span `own` (1-D).

        It holds zeros, or with `accumulate` a sum that is added to. What was collected is forgotten.
        """
        rank, columns = self._communicator.rank, self.table.columns
        rows, values = self._taken()
        counts = self._counts if self.table.ranks > 1 else [[len(rows)]]
        numbers = (rows % self.table.span).to(self.table.index).split(counts[rank])
        addends = values.to(self._wire).split(counts[rank])
        received = [counts[other][rank] for other in range(self.table.ranks)]
        theirs = [numbers[rank] if other == rank else numbers[rank].new_empty(count) for other, count in enumerate(received)]
        given = [addends[rank] if other == rank else addends[rank].new_empty(count, columns)
                 for other, count in enumerate(received)]
        label = self._labels["reduce rows"]
        arriving = [self._communicator.exchange(_to_others(mine, rank), _to_others(into, rank), label)
                    for mine, into in ((numbers, theirs), (addends, given))]
        return _Sum(self, arriving, theirs, given, own.view(-1, columns), scale, accumulate)

    def replicate(self, whole: Tensor) -> Handle:
        """Give all ranks the rows that the last reduction summed, which are in this rank's span of `whole` (1-D)."""
        assert self.summed is not None
        counts = self._counted(self.summed)
        if self._prefer_rows(counts, whole.dtype):
            return self._spread(whole, self.summed, counts, self._labels["replicate rows"])
        return self._communicator.all_gather(whole, self._labels["replicate"])

    def publish(self, whole: Tensor, *, written: bool) -> Handle:
        """Give all ranks what has changed in this rank's span of the weights `whole` (1-D) since the last time.

        `written`: somebody may have changed what this rank has of the others' spans. What has changed is found by comparing
        with a copy; where that was nearly everything, the next publications go without.
        """
        own = whole.view(-1, self.table.columns)[self._own:self._own + self.table.span]
        if self.table.ranks > 1 and not self._skip:
            changed = None if written or self._published is None else changed_rows(own, self._published)
            counts = self._counted(changed)
            if changed is not None and self._prefer_rows(counts, whole.dtype):
                self._skipped = 0
                assert self._published is not None
                self._published.index_copy_(0, changed, own[changed])
                return self._spread(whole, changed, counts, self._labels["publish rows"])
            if min(counts) >= 0:
                self._skip = self._skipped = min(2 * self._skipped + 1, MOST_SKIPPED)
            self._published = None if self._skip else own.clone()
        elif self._skip:
            self._skip -= 1
            self._published = None if self._skip else own.clone()
        return self._communicator.all_gather(whole, self._labels["publish"])

    def _counted(self, rows: Tensor | None) -> list[int]:
        """Return how many `rows` each rank has to send; -1: it cannot name them."""
        if self.table.ranks == 1:
            return [-1 if rows is None else len(rows)]
        word = torch.tensor([-1 if rows is None else len(rows)], device=self._device)
        return self._communicator.gather_words(word, self._counting).flatten().tolist()

    def _prefer_rows(self, counts: list[int], dtype: torch.dtype) -> bool:
        """Whether all send their rows to everybody, rather than their spans."""
        busiest = max(max((self.table.ranks - 1) * count, sum(counts) - count) for count in counts)
        return min(counts) >= 0 and self.table.prefers_rows(busiest, dtype)

    def _spread(self, whole: Tensor, rows: Tensor, counts: list[int], label: Label) -> Handle:
        """Give all ranks `rows` of this rank's span; `counts` says how many each has."""
        table = whole.view(-1, self.table.columns)
        numbers, values = rows.to(self.table.index), table[self._own + rows]
        theirs = [numbers.new_empty(count) for count in counts]
        given = [values.new_empty(count, self.table.columns) for count in counts]
        arriving = [self._communicator.exchange(_to_others([mine] * len(counts), self._communicator.rank),
                                                _to_others(into, self._communicator.rank), label)
                    for mine, into in ((numbers, theirs), (values, given))]
        return _Arrival(arriving, table, self.table.span, _to_others(theirs, self._communicator.rank),
                        _to_others(given, self._communicator.rank))


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


def _to_others(tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Return the tensors, that of this rank being empty."""
    return [tensor[:0] if other == rank else tensor for other, tensor in enumerate(tensors)]


class _Sum:
    """Addends of rows on their way, whose end is their sum: in rank order, in fp32 or wider."""

    def __init__(self, owner: Rows, arriving: list[Handle], numbers: list[Tensor], addends: list[Tensor], own: Tensor,
                 scale: float, accumulate: bool):
        self._owner = owner
        self._arriving: list[Handle] | None = arriving
        self._numbers, self._addends = numbers, addends
        self._own, self._scale, self._accumulate = own, scale, accumulate

    @torch.no_grad()
    def wait(self) -> None:
        if self._arriving is None:
            return
        for handle in self._arriving:
            handle.wait()
        self._arriving = None
        rows, place = torch.unique(torch.cat(self._numbers).long(), return_inverse=True)
        wide = torch.promote_types(self._addends[0].dtype, torch.float32)
        total = self._own.new_zeros((len(rows), self._own.shape[1]), dtype=wide)
        for addend, where in zip(self._addends, place.split([len(addend) for addend in self._addends]), strict=True):
            total.index_add_(0, where, addend.to(wide))
        if self._accumulate:
            total = self._own[rows].add_(total, alpha=self._scale)
        elif self._scale != 1:
            total.mul_(self._scale)
        self._own.index_copy_(0, rows, total.to(self._own.dtype))
        self._owner.summed, self._numbers, self._addends = rows, [], []


class _Arrival:
    """Rows of other ranks on their way into the whole."""

    def __init__(self, arriving: list[Handle], table: Tensor, span: int, numbers: list[Tensor], values: list[Tensor]):
        self._arriving: list[Handle] | None = arriving
        self._table, self._span = table, span
        self._numbers, self._values = numbers, values

    @torch.no_grad()
    def wait(self) -> None:
        if self._arriving is None:
            return
        for handle in self._arriving:
            handle.wait()
        self._arriving = None
        for rank, (numbers, values) in enumerate(zip(self._numbers, self._values, strict=True)):
            self._table.index_copy_(0, numbers.long() + rank * self._span, values)
        self._numbers, self._values = [], []
