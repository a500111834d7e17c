"""A checkpoint whose files are in folders of several nodes: a rank reads those of its node, and others send it the rest.

Blocks travel from one rank to one other. All ranks compute the same message order from all requests, which prevents
deadlock. The rank that asked for a block compares its checksum. Values of ranks and numbers of the optimizer, which are read
one by one, are fetched when the snapshot is opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.index import Index
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.ranks import Ranks
from shoal.checkpoint.snapshot import BlockRead, IndexedSnapshot
from shoal.checkpoint.tensor_file import DTYPES, memory
from shoal.checkpoint.writer import PRIVATE, SHARED

__all__ = ["SpreadSnapshot"]

MESSAGE = 32 << 20
"""Bytes after which a message ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """Blocks of one file, which one rank sends to another."""

    sender: int
    receiver: int
    file: str
    blocks: list[tuple[int, int]]
    """The position in the file and the bytes of each."""

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.blocks)


class SpreadSnapshot(IndexedSnapshot):
    """A checkpoint that several nodes hold together. `open` and `fill` are collective calls; other reads are not."""

    def __init__(self, path: Path, index: Index, ranks: Ranks, holders: Mapping[str, Sequence[int]]) -> None:
        super().__init__(path, index, ranks, verify=True)
        self._here = {name for name, holding in holders.items() if ranks.rank in holding}
        self._sender = {name: holding[number % len(holding)] for number, (name, holding) in enumerate(holders.items())}
        self._fetched: dict[str, Tensor] = {}

    @classmethod
    def open(cls, path: Path, index: Index, ranks: Ranks, holders: Mapping[str, Sequence[int]]) -> SpreadSnapshot:
        """Open the checkpoint `index`, of which this node's part is in the folder `path`, which may be missing.

        `holders` gives the ranks that can read each file, the same on every rank. Raises CheckpointError on every rank if
        bytes are damaged.
        """
        snapshot = cls(path, index, ranks, holders)
        own = f"{PRIVATE}{ranks.rank}/"
        small = [name for name, stored in index.tensors.items()
                 if name.startswith((SHARED, own)) or (not stored.shape and not name.startswith(PRIVATE))]
        pieces = [Piece(name=name, shape=stored.shape, start=0, stop=stored.elements,
                        data=torch.empty(stored.elements, dtype=DTYPES[stored.dtype], device="cpu"))
                  for name, stored in ((name, index.tensors[name]) for name in small)]
        snapshot.fill(pieces)
        snapshot._fetched = {piece.name: piece.data.view(piece.shape) for piece in pieces}
        return snapshot

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        found = self._fetched.get(name)
        return super().tensor(name, dtype) if found is None else found.to(dtype or found.dtype)

    def fill(self, pieces: Iterable[Piece]) -> None:
        requested = list(pieces)
        failure = f"could not load {self.path}"
        with self._ranks.lock:
            reads = self._ranks.run_collectively(failure, lambda: self._plan(requested))
            remote = [read for read in reads if read.file not in self._here]
            asked = self._ranks.all_gather(json.dumps([[read.file, read.at, read.bytes] for read in remote]).encode())
            messages = self._messages([json.loads(each) for each in asked])
            self._ranks.run_collectively(failure, lambda: self._copy_all(reads, messages))

    @torch.no_grad()
    def _copy_all(self, reads: Sequence[BlockRead], messages: Sequence[_Message]) -> None:
        """Copy what was read to its pieces, and send what others read. An error is raised when all messages are through."""
        mail = iter(messages)
        blocks = self._received(mail)
        try:
            self._copy([read for read in reads if read.file in self._here], self._load)
            self._copy([read for read in reads if read.file not in self._here],
                       lambda read: self._checked(read, next(blocks)))
        finally:
            for _ in blocks:  # the other ranks wait for these messages
                pass

    def _messages(self, asked: Sequence[Sequence[tuple[str, int, int]]]) -> list[_Message]:
        """Return the messages that serve what each rank `asked` for, in the order in which each rank takes part in them."""
        messages: list[_Message] = []
        for receiver, reads in enumerate(asked):
            for file, at, size in reads:
                last = messages[-1] if messages else None
                if last is None or (last.receiver, last.file) != (receiver, file) or last.bytes + size > MESSAGE:
                    last = _Message(sender=self._sender[file], receiver=receiver, file=file, blocks=[])
                    messages.append(last)
                last.blocks.append((at, size))
        return sorted(messages, key=lambda message: (message.file, message.receiver, message.blocks[0][0]))

    def _received(self, messages: Iterator[_Message]) -> Iterator[Tensor]:
        """Take part in all messages, and yield the blocks of those to this rank."""
        for message in messages:
            if message.sender == self._ranks.rank:
                self._ranks.exchange(sent=[(self._bytes_of(message), message.receiver)])
            elif message.receiver == self._ranks.rank:
                data = torch.empty(message.bytes, dtype=torch.uint8, device="cpu")
                self._ranks.exchange(received=[(data, message.sender)])
                yield from data.split([size for _, size in message.blocks])

    def _bytes_of(self, message: _Message) -> Tensor:
        """Read the blocks of a message; what cannot be read stays zero, and fails the receiver's checksum."""
        data = torch.zeros(message.bytes, dtype=torch.uint8, device="cpu")
        view, begin = memory(data), 0
        for at, size in message.blocks:
            with suppress(OSError):
                os.preadv(self._descriptor(message.file), [view[begin:begin + size]], at)
            begin += size
        return data
