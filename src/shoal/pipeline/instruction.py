"""An instruction is one piece of compute of a pipeline: a stage, what is done there, and to which microbatch.

It prints and parses as `2F0`: stage 2, forward, microbatch 0. What it needs before it can start is a law of backpropagation,
the same under every schedule:

    F of stage s    F of stage s-1
    I of stage s    F of stage s, and I of stage s+1
    W of stage s    I of stage s
    B               what I needs: it is I and W in one, and both are there when it ends
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from shoal.errors import UsageError

__all__ = ["Instruction", "Op"]


class Op(StrEnum):
    """What is done to a microbatch at a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both halves of backward."""
    INPUT = "I"
    """The half of backward that gives the gradient of the stage's input."""
    WEIGHT = "W"
    """The half of backward that gives the gradients of the stage's weights."""


_TEXT = re.compile(rf"(\d+)([{''.join(Op)}])(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Instruction:
    """One piece of compute. `stage` counts the stages of the whole pipeline, several per rank included."""

    stage: int
    kind: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Read what `str` wrote. Raises `UsageError` for anything else."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise UsageError(f"instruction: got {text!r}; write stage, one of {', '.join(Op)}, microbatch, such as 2F0")
        return cls(int(found[1]), Op(found[2]), int(found[3]))

    def halves(self) -> tuple[Instruction, ...]:
        """Return what is there when this has ended: of a B its I and its W, of any other itself."""
        if self.kind is not Op.BACKWARD:
            return (self,)
        return tuple(Instruction(self.stage, kind, self.microbatch) for kind in (Op.INPUT, Op.WEIGHT))

    def needs(self, stages: int) -> Iterator[Instruction]:
        """Yield what must be there before this can start, in a pipeline of `stages`; never a B, but its halves."""
        match self.kind:
            case Op.FORWARD:
                if self.stage > 0:
                    yield Instruction(self.stage - 1, Op.FORWARD, self.microbatch)
            case Op.INPUT | Op.BACKWARD:
                yield Instruction(self.stage, Op.FORWARD, self.microbatch)
                if self.stage < stages - 1:
                    yield Instruction(self.stage + 1, Op.INPUT, self.microbatch)
            case Op.WEIGHT:
                yield Instruction(self.stage, Op.INPUT, self.microbatch)
