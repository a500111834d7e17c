"""An instruction is one piece of a pipeline's compute: an operation on one microbatch at one stage.

It prints and parses as `2F0`: stage 2, forward, microbatch 0. The dependencies between instructions follow from
backpropagation and are the same under every schedule:

    F of stage s    needs F of stage s-1
    I of stage s    needs F of stage s, and I of stage s+1
    W of stage s    needs I of stage s
    B of stage s    needs what I needs; it is I and W in one, and both are done when it ends
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from shoal.errors import UsageError

__all__ = ["Instruction", "Op"]


class Op(StrEnum):
    """The operations that a stage runs on a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: input gradient and weight gradients."""
    INPUT = "I"
    """The part of backward that computes the gradient of the stage's input."""
    WEIGHT = "W"
    """The part of backward that computes the gradients of the stage's weights."""


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
        """Parse the output of `str`. Raises `UsageError` for any other text."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise UsageError(f"instruction: got {text!r}; write stage, one of {', '.join(Op)}, microbatch, such as 2F0")
        return cls(int(found[1]), Op(found[2]), int(found[3]))

    def completes(self) -> tuple[Instruction, ...]:
        """Return the instructions that are done when this one ends: the I and the W of a B, otherwise itself."""
        if self.kind is not Op.BACKWARD:
            return (self,)
        return tuple(Instruction(self.stage, kind, self.microbatch) for kind in (Op.INPUT, Op.WEIGHT))

    def dependencies(self, stages: int) -> Iterator[Instruction]:
        """Yield the instructions that must end before this one starts, in a pipeline of `stages`; F, I and W, never B."""
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
