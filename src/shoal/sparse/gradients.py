"""How an embedding travels when a step touches few of its rows: by these rows alone, to the rank that owns them.

    reduce       each rank sends its rows to their owners, which sum them in rank order     in place of a reduce-scatter
    replicate    each owner sends the rows that were summed to all                          in place of an all-gather
    publish      each owner sends the rows whose weights have changed since the last time   in place of an all-gather
    look up      each rank asks the owners of sharded weights for the rows of its batch     in place of an all-gather

The gradient of a row that nobody sends is zero, and a sum of zeros and addends is the sum of the addends: the bits are
those of the dense way. Each exchange begins with the numbers of rows, which all ranks see, so that all choose alike
between rows and the whole: rows where those of the busiest rank are fewer bytes, at `ROW_COST`, than the whole's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.log import warn_once
from shoal.recording.call import Handle
from shoal.sparse.row_tables import Table, changed_rows, summed_duplicates
from shoal.transport.collectives import Communicator, Label

__all__ = ["Rows"]

MOST_SKIPPED = 15
"""Publications without a comparison, at most, after one that found nearly every row changed."""


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
            counts = self.table.count_by_owner(counts[:0] if self._rows is None else self._rows)
        self._counts = self._communicator.gather_words(counts, self._counting).tolist()
        return all(row[0] >= 0 for row in self._counts) and self.table.prefers_rows(_busiest(self._counts), self._wire)

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
        arriving = [self._communicator.all_to_all(_to_others(mine, rank), _to_others(into, rank), label)
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

    def look_up(self, whole: Tensor, numbers: Tensor) -> bool:
        """Bring the rows called `numbers` (of any shape) from their owners into `whole` (1-D), which holds this rank's span.

        Returns, on all ranks alike, whether that was done: where all are cheaper to gather it is not. Blocks.
        """
        rank, table = self._communicator.rank, whole.view(-1, self.table.columns)
        wanted = torch.unique(numbers.long().clamp(0, len(table) - 1))  # torch says what is wrong with one out of range
        counts: list[list[int]] = self._communicator.gather_words(self.table.count_by_owner(wanted), self._counting).tolist()
        if not self.table.prefers_rows(_busiest(counts), whole.dtype):
            return False
        label, asked = self._labels["gather rows"], [row[rank] for row in counts]
        mine = list((wanted % self.table.span).to(self.table.index).split(counts[rank]))
        theirs = [mine[rank].new_empty(count) for count in asked]
        self._communicator.all_to_all(_to_others(mine, rank), _to_others(theirs, rank), label).wait()
        theirs[rank] = mine[rank]
        given = [table[self._own + numbers.long()] for numbers in theirs]
        values = [given[rank].new_empty(count, self.table.columns) for count in counts[rank]]
        self._communicator.all_to_all(_to_others(given, rank), _to_others(values, rank), label).wait()
        values[rank] = given[rank]
        table.index_copy_(0, wanted, torch.cat(values))
        return True

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
        arriving = [self._communicator.all_to_all(_to_others([mine] * len(counts), self._communicator.rank),
                                                _to_others(into, self._communicator.rank), label)
                    for mine, into in ((numbers, theirs), (values, given))]
        return _ArrivingRows(arriving, table, self.table.span, _to_others(theirs, self._communicator.rank),
                        _to_others(given, self._communicator.rank))


def _busiest(counts: list[list[int]]) -> int:
    """Return the most rows that one rank sends or receives, of those that each rank has for, or from, each other."""
    ranks = range(len(counts))
    return max(max(sum(counts[rank][other] for other in ranks if other != rank),
                   sum(counts[other][rank] for other in ranks if other != rank)) for rank in ranks)


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


class _ArrivingRows:
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
