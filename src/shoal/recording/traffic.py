"""What this process sent, counted where it is launched; and the record of it, while somebody keeps one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.recording.call import Call
from shoal.recording.recorder import Recorder

__all__ = ["Traffic", "traffic"]


@dataclass(slots=True)
class Traffic:
    """What this rank sent: calls and payload bytes by collective."""

    calls: Counter[str] = field(default_factory=Counter[str])
    bytes: Counter[str] = field(default_factory=Counter[str])
    peer_memory_bytes: int = 0
    """Of these bytes, those that ranks of one machine read from memory instead of the network."""

    @property
    def bytes_sent(self) -> int:
        return self.bytes.total()

    recorder: Recorder | None = None
    """Notes what each call took, if somebody asks for it."""

    def count(self, kind: str, size: int, *, op: str = "send", of: Tensor | Sequence[Tensor] = (),
              ranks: tuple[int, ...] = (), what: object = "", asked: bool = False) -> Call | None:
        """Count a call that sends `size` bytes; return what its end is to be told, if somebody records.

        For the record: what it does, the whole buffer, the ranks of the job, what it is for, and whether it was `asked` for.
        """
        self.calls[kind] += 1
        self.bytes[kind] += size
        if self.recorder is None:
            return None
        buffer = [of] if isinstance(of, Tensor) else of
        return self.recorder.begin(kind, size, op, buffer, ranks, str(what), asked=asked)


traffic = Traffic()
