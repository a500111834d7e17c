"""The blocks that each rank needs of others to compute its rows of a sparse layout, planned once from the whole layout.

Rank r of N has row blocks r n to (r + 1) n, and the keys of the same blocks. A row that sees keys of other ranks is either

    fetched   these blocks of keys and values are sent to its rank, once for all its rows; or
    split     its query is sent to these ranks, each computes the part of its own keys, and the parts are merged by their
              log-sum-exp: a global row, whose keys are the whole sequence

whichever sends fewer elements, row by row, the rows that need least first. A window of 3 blocks fetches 2 blocks on each
rank, whatever the length; a global row is split.

A rank then computes one attention: its rows, the rows that others have split; over its keys, and the fetched ones.

    rows      own 0 .. n, foreign n .. n + x          columns    own 0 .. n, fetched n .. n + m

Every rank plans for all of them, so that both ends of a message know its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from shoal.attention.blocks import Blocks
from shoal.sequence_parallel.moves import Moves, SentBytes

__all__ = ["BlockPlan", "block_plan"]

_KEY, _QUERY = 4, 5
"""Messages of a fetched block of keys (key, value and their gradients), and of a split row for each rank (query, output,
gradient and output again, and the query's gradient)."""


_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The split rows and the fetched blocks of one rank."""

    split: Tensor
    """(layout heads, rows of the rank) bool."""
    fetched: Tensor
    """(key heads of the layout, all blocks) bool: blocks of other ranks."""


class BlockPlan:
    """The layout of this rank, and its messages. Layout heads are 1, or those of the query."""

    def __init__(self, blocks: Blocks, heads: int, kv_heads: int, rank: int, ranks: int):
        self.rank, self.ranks, self.block = rank, ranks, blocks.block
        self.heads, self.kv_heads = heads, kv_heads
        self.rows = blocks.row_blocks // ranks
        """Row blocks of a rank."""
        self._layout = blocks.layout
        self._key_head = torch.arange(blocks.heads, device="cpu") // (heads // kv_heads)
        """The key head of the layout that each layout head reads."""
        self.needs = [self._need(peer) for peer in range(ranks)]
        self._foreign = [self._foreign_rows(peer) for peer in range(ranks)]
        self._fetched = [[columns.nonzero().flatten() for columns in need.fetched] for need in self.needs]
        self.to_keys = self._key_moves()
        self.to_queries = self._query_moves()

    def own(self, peer: int) -> slice:
        """Return the blocks of a rank."""
        return slice(peer * self.rows, (peer + 1) * self.rows)

    def _need(self, peer: int) -> Need:
        """Choose for each row of `peer` whether its keys are fetched or the row is split."""
        layout = self._layout[:, self.own(peer)].clone()
        layout[:, :, self.own(peer)] = False
        of_ranks = layout.unflatten(2, (self.ranks, self.rows)).any(3).sum(2)
        key_heads = int(self._key_head[-1]) + 1
        fetched = torch.zeros(key_heads, layout.shape[2], dtype=torch.bool, device="cpu")
        split = torch.zeros(layout.shape[:2], dtype=torch.bool, device="cpu")
        counts = layout.sum(2)
        copies = (1, 1) if key_heads > 1 or self._layout.shape[0] > 1 else (self.kv_heads, self.heads)
        for index in counts.flatten().argsort(stable=True).tolist():
            head, row = divmod(index, self.rows)
            if not counts[head, row]:
                continue
            columns, known = layout[head, row], fetched[self._key_head[head]]
            new = int((columns & ~known).sum())
            if new * _KEY * copies[0] <= int(of_ranks[head, row]) * _QUERY * copies[1]:
                known |= columns
            else:
                split[head, row] = True
        return Need(split=split, fetched=fetched)

    def _foreign_rows(self, peer: int) -> list[list[Tensor]]:
        """Return, by layout head and by owner, the split rows of owners that `peer` computes a part of."""
        found: list[list[Tensor]] = []
        for head in range(self._layout.shape[0]):
            sees = self._layout[head, :, self.own(peer)].any(1)
            none = torch.zeros(0, dtype=torch.int64, device="cpu")
            found.append([(self.needs[owner].split[head] & sees[self.own(owner)]).nonzero().flatten() + owner * self.rows
                          if owner != peer else none for owner in range(self.ranks)])
        return found

    @property
    def splits(self) -> bool:
        """Whether any rank splits a row."""
        return any(bool(need.split.any()) for need in self.needs)

    @property
    def foreign(self) -> int:
        """Blocks of rows of others that this rank computes, of the head that has most."""
        return self._foreign_count(self.rank)

    def _foreign_count(self, peer: int) -> int:
        return max(sum(map(len, rows)) for rows in self._foreign[peer])

    @property
    def fetched(self) -> int:
        """Blocks of keys that this rank fetches, of the head that needs most."""
        return max(map(len, self._fetched[self.rank]))

    @cached_property
    def blocks(self) -> Blocks:
        """This rank's part of the layout."""
        heads, own = self._layout.shape[0], self.own(self.rank)
        layout = torch.zeros(heads, self.rows + self.foreign, self.rows + self.fetched, dtype=torch.bool, device="cpu")
        row_places = torch.zeros(layout.shape[:2], dtype=torch.int32, device="cpu")
        column_places = torch.zeros(heads, layout.shape[2], dtype=torch.int32, device="cpu")
        for head in range(heads):
            fetched = self._fetched[self.rank][int(self._key_head[head])]
            numbers = torch.arange(own.start, own.stop, device="cpu")
            columns = torch.cat([numbers, fetched])
            rows = torch.cat([numbers, *self._foreign[self.rank][head]])
            visited = self._layout[head][rows][:, columns]
            visited[:self.rows, self.rows:] &= ~self.needs[self.rank].split[head][:, None]
            visited[self.rows:, self.rows:] = False
            layout[head, :len(rows), :len(columns)] = visited
            row_places[head, :len(rows)] = rows.to(torch.int32)
            column_places[head, :len(columns)] = columns.to(torch.int32)
        return Blocks(layout, self.block, row_places=row_places, column_places=column_places)

    def _key_moves(self) -> Moves:
        """Return the messages of keys and values: unit `head * rows + block`, head by head."""
        width = self.rows + self.fetched
        send: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        receive: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        own = torch.arange(self.rows, device="cpu")
        for head in range(self.kv_heads):
            mine = self._of_key_head(self.rank, head)
            for peer in range(self.ranks):
                if peer == self.rank:
                    send[peer].append(own + head * self.rows)
                    receive[peer].append(own + head * width)
                    continue
                theirs = self._of_key_head(peer, head)
                asked = theirs[theirs // self.rows == self.rank] - self.rank * self.rows
                send[peer].append(asked + head * self.rows)
                receive[peer].append((mine // self.rows == peer).nonzero().flatten() + self.rows + head * width)
        return Moves(send=tuple(map(torch.cat, send)), receive=tuple(map(torch.cat, receive)),
                     units=self.kv_heads * self.rows, results=self.kv_heads * width, shared=True)

    def _of_key_head(self, peer: int, head: int) -> Tensor:
        """Return the blocks that `peer` fetches of key head `head`, ascending."""
        return self._fetched[peer][head if len(self._fetched[peer]) > 1 else 0]

    def _query_moves(self) -> Moves:
        """Return the messages of split rows: unit `head * rows + block`, head by head."""
        height = self.rows + self.foreign
        send: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        receive: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        own = torch.arange(self.rows, device="cpu")
        for head in range(self.heads):
            layout_head = head if self._layout.shape[0] > 1 else 0
            start = self.rows + head * height
            for peer in range(self.ranks):
                if peer == self.rank:
                    send[peer].append(own + head * self.rows)
                    receive[peer].append(own + head * height)
                    continue
                send[peer].append(self._foreign[peer][layout_head][self.rank] - self.rank * self.rows + head * self.rows)
                count = len(self._foreign[self.rank][layout_head][peer])
                receive[peer].append(torch.arange(count, device="cpu") + start)
                start += count
        return Moves(send=tuple(map(torch.cat, send)), receive=tuple(map(torch.cat, receive)),
                     units=self.heads * self.rows, results=self.heads * height, shared=True)

    def sent_bytes(self, batch: int, dim: int, value_dim: int, size: int, *, peer: int | None = None) -> SentBytes:
        """Return the bytes that a rank, by default this one, sends, with elements of `size` bytes.

        forward    the keys and values that others fetch, the queries of its split rows; outputs and log-sum-exps of theirs
        backward   gradients, outputs and log-sum-exps of its split rows; gradients of what it fetched, and of their queries
        """
        mine = self.rank if peer is None else peer
        copies = self.heads if self._layout.shape[0] == 1 else 1
        key_copies = self.kv_heads if self._layout.shape[0] == 1 else 1
        lent = sum(int(need.fetched[:, self.own(mine)].sum()) for need in self.needs) * key_copies
        fetched = int(self.needs[mine].fetched.sum()) * key_copies
        split = sum(len(rows[mine]) for foreign in self._foreign for rows in foreign) * copies
        foreign = sum(len(rows) for of_head in self._foreign[mine] for rows in of_head) * copies
        positions, pair = batch * self.block, (dim + value_dim) * size
        return SentBytes(
            forward=positions * (lent * pair + split * dim * size + foreign * (value_dim * size + _FP32)),
            backward=positions * (split * (2 * value_dim * size + _FP32) + fetched * pair + foreign * dim * size))


@lru_cache(maxsize=64)
def block_plan(blocks: Blocks, heads: int, kv_heads: int, rank: int, ranks: int) -> BlockPlan:
    """Return the plan of `rank` for a layout of the whole sequence, whose rows the ranks divide evenly."""
    return BlockPlan(blocks, heads, kv_heads, rank, ranks)
