"""A schedule says in which order each rank computes; what travels between ranks follows from it.

F of stage s receives from the owner of s-1 and sends to the owner of s+1, backward the other way round (B and I; W neither
receives nor sends), and nothing travels between two stages of one rank. A schedule is a pure function of ranks, microbatches
and stages per rank, so that every rank computes the same one by itself. Any number of ranks and microbatches goes, fewer
microbatches than ranks included.

Each is a row of `SCHEDULES`: where the stages lie, how the ranks order forwards and backwards, and whether backward is
split into its halves, whose W then `fill` the waits. For p ranks, m >= p microbatches and a backward of twice a forward
(F = I = W), in units of F of all layers of a rank, of which a message travels t:

    name          bubble           activations of a rank r, at most
    gpipe         3 (p-1)          m
    1f1b          3 (p-1)          p - r
    interleaved   3 (p-1) / v      p + (p - 1 - 2r) / v, for m a multiple of p
    zb-h1         p - 1            p
    zb-h2         (p-1)(1 + t)     2p - 1, for t <= 1/2: no schedule of one stage a rank has less
    zbv           (p-1) / 2        p

Where messages travel all but zb-h2 wait at every turn. `in_flight` sets another limit of microbatches that a rank may hold
than the schedule's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from shoal.config.problem import nearest
from shoal.errors import UsageError
from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.zero_bubble import fill

__all__ = ["SCHEDULES", "PipelineSchedule", "Recipe", "forward_only", "make_schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """What each rank computes, in order."""

    name: str
    ranks: int
    microbatches: int
    owner: tuple[int, ...]
    """stage -> the rank that owns it"""
    rows: tuple[tuple[Instruction, ...], ...]
    """rank -> its instructions, in the order in which it executes them"""

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(self.owner)

    @property
    def stages_per_rank(self) -> int:
        """The most stages that one rank owns."""
        return max(self.owner.count(rank) for rank in range(self.ranks))

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """The most activations that each rank holds at once, in those of one microbatch at one stage.

        An activation is held from the start of its F to the end of its B, or of its W: I frees nothing, though part of an
        activation may be of no use after it. A rank does one thing at a time, so durations do not matter. What travels is
        not counted.
        """
        steps = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.WEIGHT: -1, Op.INPUT: 0}
        return tuple(max(accumulate(steps[instruction.kind] for instruction in row), default=0) for row in self.rows)

    @property
    def peak_microbatches(self) -> tuple[float, ...]:
        """The same in activations of one microbatch at all stages of the rank: to compare schedules of one model."""
        return tuple(peak / self.owner.count(rank) for rank, peak in enumerate(self.peak_activations))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """A rank's place in the pipeline, and the kind of backward that it orders."""

    rank: int
    ranks: int
    microbatches: int
    stages: tuple[int, ...]
    """The stages that the rank owns."""
    backward: Op
    room: int
    """The microbatches of all its stages that the rank may hold at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a schedule of any size is made."""

    summary: str
    fewest: int = 1
    """Stages per rank, at least."""
    most: int | None = 1
    """Stages per rank, at most; None: any number."""
    place: Callable[[int, int], Iterable[int]]
    """(ranks, stages per rank) -> the owner of each stage."""
    order: Callable[[_Seat], Iterable[Instruction]]
    """One rank's order; of F and I only where backward is split."""
    split: bool = False
    """Whether W is apart from I, and fills the waits."""
    room: Callable[[int], int] | None = None
    """ranks -> the microbatches of all its stages that a rank may hold at once, unless asked otherwise; None: what its
    order holds."""
    least: Callable[[int], int] = lambda ranks: 1
    """ranks -> the fewest that it can do with."""

    def takes(self, stages_per_rank: int) -> bool:
        """Whether a rank can have as many stages."""
        return self.fewest <= stages_per_rank and (self.most is None or stages_per_rank <= self.most)

    def holds(self, in_flight: int | None, ranks: int) -> bool:
        """Whether a rank can be told to hold at most as many microbatches."""
        return in_flight is None or (self.room is not None and in_flight >= self.least(ranks))

    def make(self, name: str, ranks: int, microbatches: int, stages_per_rank: int,
             in_flight: int | None) -> PipelineSchedule:
        """Carry the recipe out."""
        owner = tuple(self.place(ranks, stages_per_rank))
        backward = Op.INPUT if self.split else Op.BACKWARD
        room = in_flight if in_flight is not None else microbatches if self.room is None else self.room(ranks)
        orders = [self.order(_Seat(rank=rank, ranks=ranks, microbatches=microbatches, backward=backward, room=room,
                                   stages=tuple(stage for stage, of in enumerate(owner) if of == rank)))
                  for rank in range(ranks)]
        rows = fill(orders, stages=len(owner), room=room * stages_per_rank) if self.split else tuple(map(tuple, orders))
        return PipelineSchedule(name=name, ranks=ranks, microbatches=microbatches, owner=owner, rows=rows)


# Where stages lie


def _loops(ranks: int, stages_per_rank: int) -> Iterable[int]:
    """Rank after rank, then from the first again."""
    return chain.from_iterable([range(ranks)] * stages_per_rank)


def _v_shape(ranks: int, stages_per_rank: int) -> Iterable[int]:
    """Rank after rank, then back: the first rank has the first stage and the last."""
    assert stages_per_rank == 2
    return chain(range(ranks), reversed(range(ranks)))


# How a rank orders forwards and backwards


def _gpipe(seat: _Seat) -> Iterator[Instruction]:
    """All forwards, then all backwards (Huang et al. 2018, GPipe, arXiv 1811.06965, section 2.2)."""
    return _in_turns(_pass(Op.FORWARD, seat.stages, seat.microbatches),
                     _pass(seat.backward, seat.stages, seat.microbatches), seat.microbatches)


def _one_forward_one_backward(seat: _Seat) -> Iterator[Instruction]:
    """Some forwards, more of them the farther the rank is from the last, then a backward and a forward in turns.

    In the room of p microbatches rank r is p-1-r forwards ahead of the last (PipeDream-Flush of Narayanan et al. 2020, arXiv
    2006.09503, section 3.2). With backward split it is ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 2.1): ranks do not
    wait for W, and each may hold what the first one does. No order does better in that memory: the first rank has no room
    for one more forward until the first gradient is back, and waits p-1 for it. Nor would p-r activations on rank r do: the
    last one's, F I W in strict turns, end so late that the first waits 2 (p-1).

    With room for 2p-1 it is twice as far ahead (ZB-H2 there; eager 1F1B of Zhuang et al. 2022, arXiv 2211.05322),
    so that every message may travel half a forward without making anybody wait for it, but the first of a step. To be
    farther ahead gains nothing; room beyond that lets W wait, and more of them be one product.
    """
    hops = seat.ranks - 1
    ahead = 1 + (hops - seat.rank) * min(seat.room - 1, 2 * hops) // max(hops, 1)
    return _in_turns(_pass(Op.FORWARD, seat.stages, seat.microbatches),
                     _pass(seat.backward, seat.stages, seat.microbatches), ahead)


def _interleaved(seat: _Seat) -> Iterator[Instruction]:
    """1F1B over several stages, in groups of microbatches (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2).

    A group goes through a rank's first stage, then through its second, and so on. Groups are of as many microbatches as
    there are ranks, or more where these do not divide: as equal as they can be, for a smaller one waits for its gradients.
    """
    groups = _groups(seat.microbatches, max(1, seat.microbatches // seat.ranks))
    ahead = (len(seat.stages) - 1) * len(groups[0]) + 2 * (seat.ranks - 1 - seat.rank) + 1
    return _in_turns(_grouped(Op.FORWARD, seat.stages, groups), _grouped(seat.backward, seat.stages[::-1], groups), ahead)


def _zbv(seat: _Seat) -> Iterator[Instruction]:
    """ZB-V, of arXiv 2401.10241 too: forwards until the first comes back, then those of both stages in turns, then each that
    comes back is turned into a gradient, then all four in turns.

    A rank has 2p forwards under way when its first gradient comes, and every turn ends as many as it begins.
    """
    near, far = seat.stages
    up, down = (Op.FORWARD, near), (Op.FORWARD, far)
    back, away = (seat.backward, far), (seat.backward, near)
    to_come = seat.ranks - seat.rank
    turns = chain([up] * (2 * to_come - 1), [down, up] * seat.rank, [down, back] * to_come,
                  [up, away, down, back] * seat.microbatches)
    left = {turn: iter(range(seat.microbatches)) for turn in (up, down, back, away)}
    for kind, stage in turns:
        microbatch = next(left[kind, stage], None)
        if microbatch is not None:
            yield Instruction(stage, kind, microbatch)


def _in_turns(forwards: Sequence[Instruction], backwards: Sequence[Instruction], ahead: int) -> Iterator[Instruction]:
    """Yield `ahead` forwards, then a backward and a forward in turns, then the backwards that are left."""
    yield from forwards[:ahead]
    rest = iter(forwards[ahead:])
    for backward in backwards:
        yield backward
        yield from (forward for forward in [next(rest, None)] if forward is not None)


def _pass(kind: Op, stages: Iterable[int], microbatches: int) -> list[Instruction]:
    return _grouped(kind, stages, [range(microbatches)])


def _grouped(kind: Op, stages: Iterable[int], groups: Iterable[range]) -> list[Instruction]:
    return [Instruction(stage, kind, microbatch) for group in groups for stage in stages for microbatch in group]


def _groups(microbatches: int, count: int) -> list[range]:
    """Cut the microbatches into `count` groups; the first are larger by one where it does not divide."""
    small, larger = divmod(microbatches, count)
    starts = [group * small + min(group, larger) for group in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _as_1f1b(ranks: int) -> int:
    return ranks


def _twice_as_far_ahead(ranks: int) -> int:
    return 2 * ranks - 1


SCHEDULES: Mapping[str, Recipe] = {
    "gpipe": Recipe(place=_loops, order=_gpipe, summary="all forwards, then all backwards"),
    "1f1b": Recipe(place=_loops, order=_one_forward_one_backward, room=_as_1f1b, summary="one forward, one backward"),
    "interleaved": Recipe(place=_loops, order=_interleaved, fewest=2, most=None, summary="1F1B over several stages a rank"),
    "zb-h1": Recipe(place=_loops, order=_one_forward_one_backward, split=True, room=_as_1f1b,
                    summary="1F1B, backward split in halves"),
    "zb-h2": Recipe(place=_loops, order=_one_forward_one_backward, split=True, room=_twice_as_far_ahead,
                    summary="backward split, forwards so far ahead that messages may travel"),
    "zbv": Recipe(place=_v_shape, order=_zbv, fewest=2, most=2, split=True, room=_as_1f1b, least=_as_1f1b,
                  summary="there and back again, backward split"),
}
"""The schedules of training, by name."""

_TORCH = {"interleaved1f1b": "interleaved", "zbvzerobubble": "zbv"}
"""What torch calls them, without `PipelineSchedule` in front."""


def make_schedule(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None,
                  in_flight: int | None = None) -> PipelineSchedule:
    """Make the schedule called `name`, in any case, or by the name of torch's class; stages per rank are its fewest if None.

    `in_flight` is how many microbatches a rank may hold at once, None for as many as the schedule says. Raises
    `UsageError` for a name that is not known, and for numbers that it cannot do.
    """
    plain = name.lower().removeprefix("schedule")
    known = _TORCH.get(plain, plain)
    if known not in SCHEDULES:
        near = nearest(name, SCHEDULES)
        raise UsageError(f"pipeline schedule: got {name!r}; {f'did you mean {near!r}? It is ' if near else 'choose '}one of "
                         f"{', '.join(SCHEDULES)}")
    _at_least_one(ranks=ranks, microbatches=microbatches)
    recipe = SCHEDULES[known]
    each = recipe.fewest if stages_per_rank is None else stages_per_rank
    if not recipe.takes(each):
        allowed = f"{recipe.fewest} or more" if recipe.most is None else f"{recipe.fewest}"
        others = [other for other, row in SCHEDULES.items() if row.takes(each)]
        raise UsageError(f"pipeline schedule {known}: stages_per_rank: got {each}; {known} takes {allowed}"
                         + (f"; with {each} choose {' or '.join(others)}" if others else ""))
    if not recipe.holds(in_flight, ranks):
        others = ", ".join(other for other, row in SCHEDULES.items() if row.holds(in_flight, ranks))
        raise UsageError(f"pipeline schedule {known}: in_flight: got {in_flight}; "
                         + ("its order says what a rank holds, so leave it out" if recipe.room is None else
                            f"on {ranks} rank{'s' * (ranks > 1)} give {recipe.least(ranks)} or more")
                         + (f"; or choose {others}" if others else ""))
    return recipe.make(known, ranks, microbatches, each, in_flight)


def forward_only(*, ranks: int, microbatches: int, owner: Sequence[int]) -> PipelineSchedule:
    """Make the schedule of an evaluation: each rank takes the microbatch that is farthest on its way.

    Raises `UsageError` unless `owner`, of each stage, names every rank of `ranks` and no other.
    """
    _at_least_one(ranks=ranks, microbatches=microbatches)
    if set(owner) != set(range(ranks)):
        raise UsageError(f"pipeline schedule: owner: got {tuple(owner)}; each of the ranks 0 to {ranks - 1} owns a stage, "
                         f"and no other rank does")
    stages_of = [[stage for stage in reversed(range(len(owner))) if owner[stage] == rank] for rank in range(ranks)]
    rows: list[list[Instruction]] = [[] for _ in range(ranks)]
    done = [microbatches, *[0] * len(owner)]  # the forwards that have arrived before each stage, and after the last
    while done[-1] < microbatches:
        before = tuple(done)
        for stages, row in zip(stages_of, rows, strict=True):
            ready = next((stage for stage in stages if before[stage + 1] < before[stage]), None)
            if ready is not None:
                row.append(Instruction(ready, Op.FORWARD, done[ready + 1]))
                done[ready + 1] += 1
    return PipelineSchedule(name="forward only", ranks=ranks, microbatches=microbatches, owner=tuple(owner),
                    rows=tuple(map(tuple, rows)))


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"pipeline schedule: {name}: got {count}; give 1 or more")
