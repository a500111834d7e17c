"""Row-wise collectives of an embedding whose gradient touches few rows; rank r owns a contiguous shard of rows.

    reduce        each rank sends its rows to their owners, which sum them in rank order     instead of a reduce-scatter
    replicate     each owner sends the reduced rows to all ranks                             instead of an all-gather
    publish       each owner sends the rows whose weights changed since the last time        instead of an all-gather
    gather_rows   each rank requests the rows of its batch from the owners of the shards     instead of an all-gather

A row that no rank sends has a gradient of zero, and adding zeros changes no bit: the result is that of the dense collective,
bit for bit. Each exchange begins with an all-gather of row counts, so that all ranks make the same choice between rows and
the dense collective: rows, if those of the busiest rank, weighted by `ROW_COST`, are fewer bytes than that would send.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.log import warn_once
from shoal.recording.call import Handle
from shoal.transport.collectives import Communicator, Label
from shoal.transport.reduction import wide_dtype

__all__ = ["ROW_COST", "RowExchange", "RowTable", "changed_rows", "coalesced", "to_dense"]

ROW_COST = 2.5
"""The cost of a byte of a row relative to a byte of a whole shard: rows are sorted, gathered and scattered one by one.
Measured at 1 Gbit/s (docs/sparse.md). On a slower network the work weighs less beside the transfer, on a faster one more."""

MOST_SKIPPED = 15
"""Publications that may follow each other without comparing rows: where nearly all rows change, to compare is in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """The partition of an embedding's rows over the ranks: rank r owns rows [r * n, (r + 1) * n) of `rows_per_rank` n."""

    columns: int
    rows_per_rank: int
    """Rows owned by each rank, padding included."""
    ranks: int

    @property
    def index(self) -> torch.dtype:
        """The dtype of a row number within its owner's shard."""
        return torch.int32 if self.rows_per_rank <= torch.iinfo(torch.int32).max else torch.int64

    def count_by_owner(self, rows: Tensor) -> Tensor:
        """Return the number of the sorted `rows` that each rank owns, (ranks,)."""
        boundaries = torch.arange(self.ranks + 1, device=rows.device) * self.rows_per_rank
        return torch.searchsorted(rows, boundaries).diff()

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one row on the wire, its number included."""
        return self.columns * dtype.itemsize + self.index.itemsize

    def prefers_rows(self, busiest: int, dtype: torch.dtype) -> bool:
        """Whether sending rows is cheaper than the dense collective, if the busiest rank sends or receives so many rows."""
        whole = (self.ranks - 1) * self.rows_per_rank * self.columns * dtype.itemsize
        return busiest * self.row_bytes(dtype) * ROW_COST <= whole


class RowExchange:
    """The row-wise collectives of one embedding on one rank, with the gradient rows collected for the next reduction."""

    def __init__(self, communicator: Communicator, size: int, columns: int, accumulate: torch.dtype, wire: torch.dtype,
                 device: torch.device, *, unit: str, index: int):
        """`size` is the number of elements of the embedding, padding included; `columns` is its width."""
        self.table = table = RowTable(columns=columns, rows_per_rank=size // columns // communicator.ranks,
                                      ranks=communicator.ranks)
        self._communicator = communicator
        self._own = communicator.rank * table.rows_per_rank
        self._accumulate, self._wire, self._device = accumulate, wire, device
        self._labels = {kind: Label(kind=kind, unit=unit, index=index) for kind in Label.KINDS}
        self._unit = unit
        self._counting = f"counting rows of unit '{unit}'"
        self._rows: Tensor | None = None
        """The row numbers collected, unique and sorted; None: none."""
        self._values: Tensor | None = None
        self._counts: list[list[int]] = []
        """Rows of the current reduction: [sender][owner]."""
        self.reduced: Tensor | None = None
        """The row numbers within this rank's shard that the last reduction wrote."""
        self._published: Tensor | None = None
        """A copy of this rank's shard as last published; None: not kept."""
        self._skip = self._skipped = 0  # publications until the next comparison; length of the last such pause

    @property
    def collected(self) -> bool:
        """Whether any rows wait to be reduced."""
        return self._rows is not None

    def collect(self, gradient: Tensor, factor: float) -> None:
        """Add a COO `gradient` times `factor`, with the arithmetic of the dense accumulation."""
        rows, values = coalesced(gradient)
        if self._rows is None or self._values is None:
            if values.dtype == self._accumulate:
                values = values if factor == 1 else values * factor
            else:
                values = values.to(self._accumulate).mul_(factor)
            self._rows, self._values = rows, values
            return
        union, position = torch.unique(torch.cat((self._rows, rows)), return_inverse=True)
        old, new = position.split((len(self._rows), len(rows)))
        merged = self._values.new_zeros(len(union), self.table.columns).index_copy_(0, old, self._values)
        self._values = merged.index_copy_(0, new, merged[new].add_(values, alpha=factor))
        self._rows = union

    def move_to(self, view: Tensor, *, accumulate: bool) -> None:
        """Move the collected rows into the dense `view` (rows, columns), which they overwrite unless `accumulate`."""
        if not accumulate:
            view.zero_()
        view.index_add_(0, *self._take())

    def _take(self) -> tuple[Tensor, Tensor]:
        """Return the collected row numbers and values, and clear them."""
        rows, values = self._rows, self._values
        self.clear()
        if rows is None or values is None:
            none = torch.empty((0, self.table.columns), dtype=self._accumulate, device=self._device)
            return torch.empty(0, dtype=torch.int64, device=self._device), none
        return rows, values

    def clear(self) -> None:
        """Drop the collected rows."""
        self._rows = self._values = None

    def agree_on_rows(self, *, dense: bool) -> bool:
        """Return, the same on all ranks, whether to reduce by rows. `dense`: this rank has a dense gradient. Blocks."""
        if dense:
            warn_once(f"sparse_gradients: the gradient of unit '{self._unit}' is dense, because another module than the "
                      f"embedding uses its weight (a tied head?); it is reduced whole")
        if self.table.ranks == 1:
            return not dense
        counts = torch.full((self.table.ranks,), -1, dtype=torch.int64, device=self._device)
        if not dense:
            counts = self.table.count_by_owner(counts[:0] if self._rows is None else self._rows)
        self._counts = self._communicator.gather_words(counts, self._counting).tolist()
        return all(row[0] >= 0 for row in self._counts) and self.table.prefers_rows(_busiest(self._counts), self._wire)

    def reduce(self, own: Tensor, *, scale: float, accumulate: bool) -> Handle:
        """Sum the collected rows of all ranks, times `scale`, into this rank's shard `own` (1-D), and clear them.

        `own` holds zeros, or with `accumulate` the sum to add to.
        """
        rank, columns = self._communicator.rank, self.table.columns
        rows, values = self._take()
        counts = self._counts if self.table.ranks > 1 else [[len(rows)]]
        numbers = (rows % self.table.rows_per_rank).to(self.table.index).split(counts[rank])
        addends = values.to(self._wire).split(counts[rank])
        received = list(enumerate(counts[other][rank] for other in range(self.table.ranks)))
        number_buffers = [numbers[rank] if other == rank else numbers[rank].new_empty(count) for other, count in received]
        addend_buffers = [addends[rank] if other == rank else addends[rank].new_empty(count, columns)
                          for other, count in received]
        label = self._labels["reduce rows"]
        arriving = [self._communicator.all_to_all(_to_others(mine, rank), _to_others(into, rank), label)
                    for mine, into in ((numbers, number_buffers), (addends, addend_buffers))]
        return _RowReduction(self, arriving, number_buffers, addend_buffers, own.view(-1, columns), scale, accumulate)

    def replicate(self, whole: Tensor) -> Handle:
        """All-gather the rows that the last reduction wrote to this rank's shard of `whole` (1-D)."""
        assert self.reduced is not None
        counts = self._gather_counts(self.reduced)
        if self._prefer_rows(counts, whole.dtype):
            return self._all_gather_rows(whole, self.reduced, counts, self._labels["replicate rows"])
        return self._communicator.all_gather(whole, self._labels["replicate"])

    def publish(self, whole: Tensor, *, written: bool) -> Handle:
        """All-gather the rows that changed in this rank's shard of the weights `whole` (1-D) since the last publication.

        `written`: this rank's copy of other shards may have been modified, so that all shards are sent whole. Changed rows
        are found by comparing with a copy; once nearly all rows changed, the next publications skip the comparison.
        """
        own = whole.view(-1, self.table.columns)[self._own:self._own + self.table.rows_per_rank]
        if self.table.ranks > 1 and not self._skip:
            changed = None if written or self._published is None else changed_rows(own, self._published)
            counts = self._gather_counts(changed)
            if changed is not None and self._prefer_rows(counts, whole.dtype):
                self._skipped = 0
                assert self._published is not None
                self._published.index_copy_(0, changed, own[changed])
                return self._all_gather_rows(whole, changed, counts, self._labels["publish rows"])
            if min(counts) >= 0:
                self._skip = self._skipped = min(2 * self._skipped + 1, MOST_SKIPPED)
            self._published = None if self._skip else own.clone()
        elif self._skip:
            self._skip -= 1
            self._published = None if self._skip else own.clone()
        return self._communicator.all_gather(whole, self._labels["publish"])

    def gather_rows(self, whole: Tensor, numbers: Tensor) -> bool:
        """Fetch the rows `numbers` (any shape) from their owners into `whole` (1-D), which holds this rank's shard.

        Returns False, the same on all ranks, if gathering the whole table is cheaper; then nothing was fetched. Blocks.
        """
        rank, table = self._communicator.rank, whole.view(-1, self.table.columns)
        wanted = torch.unique(numbers.long().clamp(0, len(table) - 1))  # the forward reports indices out of range
        counts: list[list[int]] = self._communicator.gather_words(self.table.count_by_owner(wanted), self._counting).tolist()
        if not self.table.prefers_rows(_busiest(counts), whole.dtype):
            return False
        label, requested = self._labels["gather rows"], [row[rank] for row in counts]
        mine = list((wanted % self.table.rows_per_rank).to(self.table.index).split(counts[rank]))
        theirs = [mine[rank].new_empty(count) for count in requested]
        self._communicator.all_to_all(_to_others(mine, rank), _to_others(theirs, rank), label).wait()
        theirs[rank] = mine[rank]
        replies = [table[self._own + numbers.long()] for numbers in theirs]
        values = [replies[rank].new_empty(count, self.table.columns) for count in counts[rank]]
        self._communicator.all_to_all(_to_others(replies, rank), _to_others(values, rank), label).wait()
        values[rank] = replies[rank]
        table.index_copy_(0, wanted, torch.cat(values))
        return True

    def _gather_counts(self, rows: Tensor | None) -> list[int]:
        """All-gather the number of `rows` that each rank sends; -1: the rank does not know its rows."""
        if self.table.ranks == 1:
            return [-1 if rows is None else len(rows)]
        count = torch.tensor([-1 if rows is None else len(rows)], dtype=torch.int64, device=self._device)
        return self._communicator.gather_words(count, self._counting).flatten().tolist()

    def _prefer_rows(self, counts: list[int], dtype: torch.dtype) -> bool:
        """Whether to all-gather rows rather than whole shards."""
        busiest = max(max((self.table.ranks - 1) * count, sum(counts) - count) for count in counts)
        return min(counts) >= 0 and self.table.prefers_rows(busiest, dtype)

    def _all_gather_rows(self, whole: Tensor, rows: Tensor, counts: list[int], label: Label) -> Handle:
        """All-gather `rows` of this rank's shard; `counts` are the rows of each rank."""
        table = whole.view(-1, self.table.columns)
        numbers, values = rows.to(self.table.index), table[self._own + rows]
        number_buffers = [numbers.new_empty(count) for count in counts]
        value_buffers = [values.new_empty(count, self.table.columns) for count in counts]
        arriving = [self._communicator.all_to_all(_to_others([mine] * len(counts), self._communicator.rank),
                                                  _to_others(into, self._communicator.rank), label)
                    for mine, into in ((numbers, number_buffers), (values, value_buffers))]
        return _ArrivingRows(arriving, table, self.table.rows_per_rank, _to_others(number_buffers, self._communicator.rank),
                             _to_others(value_buffers, self._communicator.rank))


def _busiest(counts: list[list[int]]) -> int:
    """Return the most rows that one rank sends to, or receives from, all others; `counts` is [sender][receiver]."""
    ranks = range(len(counts))
    return max(max(sum(counts[rank][other] for other in ranks if other != rank),
                   sum(counts[other][rank] for other in ranks if other != rank)) for rank in ranks)


def _to_others(tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Return the tensors, with an empty one in place of this rank's."""
    return [tensor[:0] if other == rank else tensor for other, tensor in enumerate(tensors)]


class _RowsInFlight(ABC):
    """The handle of row numbers and values that arrive from all ranks: the first `wait` stores them, a later one is free."""

    def __init__(self, arriving: list[Handle], numbers: list[Tensor], values: list[Tensor]):
        self._arriving: list[Handle] | None = arriving
        self._numbers, self._values = numbers, values

    @torch.no_grad()
    def wait(self) -> None:
        if self._arriving is None:
            return
        for handle in self._arriving:
            handle.wait()
        self._arriving = None
        self._store()
        self._numbers, self._values = [], []

    @abstractmethod
    def _store(self) -> None:
        """Put the rows that have arrived, by rank, where they belong."""


class _RowReduction(_RowsInFlight):
    """A reduction by rows, which sums the received rows in rank order, in fp32 or wider."""

    def __init__(self, exchange: RowExchange, arriving: list[Handle], numbers: list[Tensor], addends: list[Tensor],
                 own: Tensor, scale: float, accumulate: bool):
        super().__init__(arriving, numbers, addends)
        self._exchange = exchange
        self._own, self._scale, self._accumulate = own, scale, accumulate

    def _store(self) -> None:
        rows, position = torch.unique(torch.cat(self._numbers).long(), return_inverse=True)
        wide = wide_dtype(self._values[0].dtype)
        total = self._own.new_zeros((len(rows), self._own.shape[1]), dtype=wide)
        for addend, where in zip(self._values, position.split([len(addend) for addend in self._values]), strict=True):
            total.index_add_(0, where, addend.to(wide))
        if self._accumulate:
            total = self._own[rows].add_(total, alpha=self._scale)
        elif self._scale != 1:
            total.mul_(self._scale)
        self._own.index_copy_(0, rows, total.to(self._own.dtype))
        self._exchange.reduced = rows


class _ArrivingRows(_RowsInFlight):
    """An all-gather of rows, which copies them into the whole table."""

    def __init__(self, arriving: list[Handle], table: Tensor, rows_per_rank: int, numbers: list[Tensor],
                 values: list[Tensor]):
        super().__init__(arriving, numbers, values)
        self._table, self._rows_per_rank = table, rows_per_rank

    def _store(self) -> None:
        for rank, (numbers, values) in enumerate(zip(self._numbers, self._values, strict=True)):
            self._table.index_copy_(0, numbers.long() + rank * self._rows_per_rank, values)


def coalesced(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row numbers of a COO `gradient`, unique and sorted, and their values (rows, columns).

    On the host duplicates are added in the order of their occurrence, as in the dense gradient of an embedding, except that
    16-bit values are summed in fp32.
    """
    if gradient.is_coalesced() or gradient.device.type != "cpu":
        gradient = gradient.coalesce()
        return gradient.indices()[0], gradient.values()
    values = gradient._values()  # pyright: ignore[reportPrivateUsage]  the public accessor requires a coalesced tensor
    rows, position = torch.unique(gradient._indices()[0], return_inverse=True)  # pyright: ignore[reportPrivateUsage]
    return rows, values.new_zeros(len(rows), values.shape[1]).index_add_(0, position, values)


def to_dense(gradient: Tensor, name: str, *, compressed: bool = False) -> Tensor:
    """Return the gradient of the parameter `name` as a dense tensor; warn once if it is sparse.

    `compressed`: the optimizer may compress gradients, so that rows cannot be exchanged.
    """
    if not gradient.is_sparse:
        return gradient
    advice = ("reduced whole, as the optimizer asks, which compresses communication; to exchange rows, take another "
              "optimizer and set \"sparse_gradients\": true" if compressed else
              "reduced whole; set \"sparse_gradients\": true to exchange only the rows that a step touches, if only "
              "embeddings use the weight")
    warn_once(f"the sparse gradient of '{name}' is made dense and {advice}")
    rows, values = coalesced(gradient)
    return values.new_zeros(gradient.shape).index_copy_(0, rows, values)


def changed_rows(now: Tensor, before: Tensor) -> Tensor:
    """Return the numbers of the rows of `now` (rows, columns) in which any bit differs from `before`."""
    def words(table: Tensor, width: int) -> Tensor:
        fits = (word for word in (torch.int64, torch.int32, torch.int16)
                if table.shape[1] * width % word.itemsize == 0 and table.storage_offset() * width % word.itemsize == 0)
        return table.view(next(fits, torch.uint8))

    width = now.element_size()
    different = torch.ne(words(now, width), words(before, width))
    if different.shape[1] % torch.int64.itemsize == 0:  # test eight bools at once
        different = different.view(torch.int64)
    return different.any(1).nonzero().flatten()
