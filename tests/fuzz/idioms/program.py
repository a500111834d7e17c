"""A seed gives one program: the same one wherever it is drawn, so that the seed reproduces a failure."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .operations import OPERATIONS

TIERS = ((), (), (), ("optimizer cpu",), ("param cpu", "optimizer cpu"), ("param nvme", "optimizer nvme"), ("param cpu",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation of a program."""

    name: str
    """A key of `OPERATIONS`."""
    seed: int
    """Draws the arguments."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model, how it is trained, and what is done with it."""

    seed: int
    ranks: int
    stage: int
    tiers: tuple[str, ...]
    accumulation: int
    optimizer: str
    persistent: int
    """Parameters of so many elements stay whole at stage 3."""
    reuse: bool
    """Weights stay gathered from their forward to their backward."""
    blocks: int
    tied: bool
    recompute: bool | None
    """Whether blocks are recomputed by a pass within backward; None: nothing is recomputed."""
    frozen: bool
    """The second block is not trained."""
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        tiers = f" ({', '.join(self.tiers)})" if self.tiers else ""
        marks = [f"{self.blocks} blocks", self.optimizer, f"accumulation {self.accumulation}",
                 *(mark for mark, on in (("tied", self.tied), ("frozen", self.frozen), ("no reuse", not self.reuse),
                                         ("persistent", self.persistent)) if on),
                 *({None: [], True: ["recompute, re-entrant"], False: ["recompute"]}[self.recompute])]
        return f"stage {self.stage}{tiers}, {self.ranks} ranks, {', '.join(marks)}: {', '.join(map(str, self.steps))}"


def draw(seed: int) -> Program:
    """Return the program of `seed`."""
    random = Random(seed)
    names, weights = [*OPERATIONS], [operation.weight for operation in OPERATIONS.values()]
    tiers = random.choice(TIERS)
    stage = random.choice((0, 1, 2, 3, 3, 3, 3))
    return Program(
        seed=seed, ranks=random.choice((1, 1, 1, 2)), stage=stage, tiers=tiers, accumulation=random.choice((1, 1, 1, 2, 3)),
        optimizer=random.choice(("SGD", "AdamW")), persistent=random.choice((0, 0, 20)), reuse=random.random() < 0.7,
        blocks=random.choice((2, 3)), tied=random.random() < 0.3, recompute=random.choice((None, None, None, False, True)),
        frozen=random.random() < 0.15,
        steps=tuple(Step(name=name, seed=random.randrange(1 << 30))
                    for name in random.choices(names, weights, k=random.randint(4, 12))))
