"""A schedule is pure data: the order in which each rank runs its instructions. The messages between ranks follow from it.

F of stage s receives from the owner of s-1 and sends to the owner of s+1; B and I the other way round; W neither receives
nor sends; two stages of one rank exchange no messages. A schedule is a pure function of ranks, microbatches and stages per
rank, so every rank computes the same one by itself. Any number of ranks and microbatches is allowed, fewer microbatches than
ranks included.

A schedule is a row of `SCHEDULES`: the placement of stages on ranks, the order of forwards and backwards on each rank, and
whether backward is split into I and W, in which case W fills the idle time (`_fill_weights`). For p ranks, m >= p
microbatches and F = I = W, in units of F through all layers of a rank, where a message takes t:

    name          bubble           peak activations of rank r
    gpipe         3 (p-1)          m
    1f1b          3 (p-1)          p - r
    interleaved   3 (p-1) / v      p + (p - 1 - 2r) / v, for m a multiple of p
    zb-h1         p - 1            p
    zb-h2         (p-1)(1 + t)     2p - 1; for t <= 1/2 the least of any schedule with one stage a rank
    zbv           (p-1) / 2        p

Where messages take time, every schedule but zb-h2 waits for one in each turn. `in_flight` overrides the number of
microbatches that a rank may hold at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from shoal.config.problem import nearest
from shoal.errors import UsageError
from shoal.pipeline.instruction import Instruction, Op

__all__ = ["SCHEDULES", "PipelineSchedule", "Recipe", "forward_only", "known_schedule", "make_schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """The instructions of every rank, in order, and the placement of stages."""

    name: str
    ranks: int
    microbatches: int
    owner: tuple[int, ...]
    """stage -> the rank that owns it"""
    rows: tuple[tuple[Instruction, ...], ...]
    """rank -> its instructions, in execution order"""

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
        """The peak number of activations on each rank; one activation is that of one microbatch at one stage.

        An activation is held from the start of its F to the end of its B or W. I frees nothing, though part of an
        activation is not needed after it. A rank runs one instruction at a time, so durations do not matter. Messages in
        flight are not counted.
        """
        changes = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.WEIGHT: -1, Op.INPUT: 0}
        return tuple(max(accumulate(changes[instruction.kind] for instruction in row), default=0) for row in self.rows)

    @property
    def peak_microbatches(self) -> tuple[float, ...]:
        """`peak_activations` in microbatches at all stages of the rank: comparable between schedules of one model."""
        return tuple(peak / self.owner.count(rank) for rank, peak in enumerate(self.peak_activations))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankRole:
    """The arguments from which one rank's order follows."""

    rank: int
    ranks: int
    microbatches: int
    stages: tuple[int, ...]
    """The stages that the rank owns."""
    backward: Op
    """INPUT where backward is split, else BACKWARD."""
    in_flight: int
    """Microbatches, at all its stages, that the rank may hold at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The functions and limits that define a schedule for any number of ranks and microbatches."""

    summary: str
    min_stages: int = 1
    """The least number of stages per rank."""
    max_stages: int | None = 1
    """The largest number of stages per rank; None: any."""
    place: Callable[[int, int], Iterable[int]]
    """(ranks, stages per rank) -> the owner of each stage."""
    order: Callable[[_RankRole], Iterable[Instruction]]
    """One rank's order of F and B, or of F and I where backward is split."""
    split: bool = False
    """Whether W is separate from I, and fills idle time."""
    default_in_flight: Callable[[int], int] | None = None
    """ranks -> the microbatches, at all its stages, that a rank holds at once by default; None: the order fixes them."""
    min_in_flight: Callable[[int], int] = lambda ranks: 1
    """ranks -> the smallest allowed limit."""

    def allows_stages(self, stages_per_rank: int) -> bool:
        """Return whether a rank may own that many stages."""
        return self.min_stages <= stages_per_rank and (self.max_stages is None or stages_per_rank <= self.max_stages)

    def allows_in_flight(self, in_flight: int | None, ranks: int) -> bool:
        """Return whether `in_flight` is an allowed limit of microbatches on `ranks` ranks; None always is."""
        return in_flight is None or (self.default_in_flight is not None and in_flight >= self.min_in_flight(ranks))

    def make(self, name: str, ranks: int, microbatches: int, stages_per_rank: int,
             in_flight: int | None) -> PipelineSchedule:
        """Make the schedule. The arguments are valid by `allows_stages` and `allows_in_flight`."""
        owner = tuple(self.place(ranks, stages_per_rank))
        backward = Op.INPUT if self.split else Op.BACKWARD
        if in_flight is None:
            in_flight = microbatches if self.default_in_flight is None else self.default_in_flight(ranks)
        orders = [self.order(_RankRole(rank=rank, ranks=ranks, microbatches=microbatches, backward=backward,
                                       in_flight=in_flight,
                                       stages=tuple(stage for stage, of in enumerate(owner) if of == rank)))
                  for rank in range(ranks)]
        rows = (_fill_weights(orders, stages=len(owner), limit=in_flight * stages_per_rank) if self.split
                else tuple(map(tuple, orders)))
        return PipelineSchedule(name=name, ranks=ranks, microbatches=microbatches, owner=owner, rows=rows)


# Placement of stages on ranks


def _loops(ranks: int, stages_per_rank: int) -> Iterable[int]:
    """Stage s is on rank s mod p."""
    return chain.from_iterable([range(ranks)] * stages_per_rank)


def _v_shape(ranks: int, stages_per_rank: int) -> Iterable[int]:
    """Stages 0 to p-1 are on ranks 0 to p-1, stages p to 2p-1 on ranks p-1 to 0: rank 0 has the first and the last."""
    assert stages_per_rank == 2
    return chain(range(ranks), reversed(range(ranks)))


# Order of forwards and backwards on one rank


def _gpipe(role: _RankRole) -> Iterator[Instruction]:
    """All forwards, then all backwards (Huang et al. 2018, GPipe, arXiv 1811.06965, section 2.2)."""
    return _in_turns(_pass(Op.FORWARD, role.stages, role.microbatches),
                     _pass(role.backward, role.stages, role.microbatches), role.microbatches)


def _one_forward_one_backward(role: _RankRole) -> Iterator[Instruction]:
    """Some warm-up forwards, more on earlier ranks, then one backward and one forward in turns.

    With p microbatches in flight, rank r runs p-1-r more warm-up forwards than the last rank (PipeDream-Flush of Narayanan
    et al. 2020, arXiv 2006.09503, section 3.2). With backward split it is ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section
    2.1): no rank waits for W, and every rank may hold p microbatches. No order has a smaller bubble in that memory: the
    first rank may not start another forward until the first gradient is back, and waits p-1 for it. With only p-r
    activations on rank r the bubble would be larger: the last rank runs F, I, W in strict turns and ends so late that the
    first waits 2 (p-1).

    With 2p-1 in flight the warm-up is twice as long (ZB-H2 there; eager 1F1B of Zhuang et al. 2022, arXiv 2211.05322), so
    that a message may take half a forward and no rank waits for it, except for the first of a step. A longer warm-up gains
    nothing. A higher limit only delays W, so that more of them run as one product.
    """
    hops = role.ranks - 1
    ahead = 1 + (hops - role.rank) * min(role.in_flight - 1, 2 * hops) // max(hops, 1)
    return _in_turns(_pass(Op.FORWARD, role.stages, role.microbatches),
                     _pass(role.backward, role.stages, role.microbatches), ahead)


def _interleaved(role: _RankRole) -> Iterator[Instruction]:
    """1F1B over several stages, in groups of microbatches (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2).

    A group runs through a rank's first stage, then through its second, and so on. A group has p microbatches, or more
    where p does not divide m; groups are as equal as possible, because a smaller one waits for its gradients.
    """
    groups = _groups(role.microbatches, max(1, role.microbatches // role.ranks))
    ahead = (len(role.stages) - 1) * len(groups[0]) + 2 * (role.ranks - 1 - role.rank) + 1
    return _in_turns(_grouped(Op.FORWARD, role.stages, groups), _grouped(role.backward, role.stages[::-1], groups), ahead)


def _zbv(role: _RankRole) -> Iterator[Instruction]:
    """ZB-V, of arXiv 2401.10241 too.

    A rank runs forwards of its first stage until the first microbatch returns to its second stage; then forwards of both
    stages in turns; then forward and backward of the second stage in turns; then all four in turns. A rank has 2p forwards
    in flight when its first gradient arrives, and every later turn ends as many as it starts.
    """
    first, second = role.stages
    forward_1, forward_2 = (Op.FORWARD, first), (Op.FORWARD, second)
    backward_2, backward_1 = (role.backward, second), (role.backward, first)
    after = role.ranks - role.rank
    turns = chain([forward_1] * (2 * after - 1), [forward_2, forward_1] * role.rank, [forward_2, backward_2] * after,
                  [forward_1, backward_1, forward_2, backward_2] * role.microbatches)
    left = {turn: iter(range(role.microbatches)) for turn in (forward_1, forward_2, backward_2, backward_1)}
    for kind, stage in turns:
        microbatch = next(left[kind, stage], None)
        if microbatch is not None:
            yield Instruction(stage, kind, microbatch)


def _in_turns(forwards: Sequence[Instruction], backwards: Sequence[Instruction], ahead: int) -> Iterator[Instruction]:
    """Yield `ahead` forwards, then a backward and a forward in turns, then the remaining backwards."""
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
    """Cut the microbatches into `count` groups; the first ones are larger by one where `count` does not divide."""
    small, larger = divmod(microbatches, count)
    starts = [group * small + min(group, larger) for group in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


# Placement of W


def _fill_weights(orders: Sequence[Iterable[Instruction]], *, stages: int,
                  limit: int) -> tuple[tuple[Instruction, ...], ...]:
    """Return `orders`, of F and I for each rank, with a W for each I.

    The rank before waits for the gradient of a stage's input, and no rank waits for the gradients of its weights (Qi et al.
    2023, arXiv 2401.10241, section 2). So the order of F and I is given, and W fills it, as in section 3.1 there: in steps
    of one time unit, in each of which a rank runs

        the next F or I of its order    if its dependencies are done, and an F only below the limit
        the oldest pending W            otherwise
        nothing                         if no W is pending

    No rank holds more than `limit` activations of one microbatch at one stage: an F takes one and its W releases it.
    """
    ranks = [_Rank(order, stages, limit) for order in orders]
    done: set[Instruction] = set()
    while any(rank.unfinished for rank in ranks):
        chosen = [rank.run_next(done) for rank in ranks]  # all before `done` changes: they run in the same time unit
        assert any(chosen), "the orders of F and I wait for each other, or for an activation to be released"
        done.update(instruction for instruction in chosen if instruction is not None)
    return tuple(tuple(rank.row) for rank in ranks)


class _Rank:
    """One rank during `_fill_weights`: its finished row, its remaining order and its pending W."""

    def __init__(self, order: Iterable[Instruction], stages: int, limit: int):
        self.row: list[Instruction] = []
        self._order = deque(order)
        self._pending: deque[Instruction] = deque()
        self._stages = stages
        self._free = limit

    @property
    def unfinished(self) -> bool:
        return bool(self._order or self._pending)

    def run_next(self, done: set[Instruction]) -> Instruction | None:
        """Append the next instruction to the row, and return it."""
        if self._order and self._can_run(self._order[0], done):
            instruction = self._order.popleft()
        elif self._pending:
            instruction = self._pending.popleft()
        else:
            return None
        if instruction.kind is Op.INPUT:
            self._pending.append(Instruction(instruction.stage, Op.WEIGHT, instruction.microbatch))
        self._free += {Op.FORWARD: -1, Op.WEIGHT: 1}.get(instruction.kind, 0)
        self.row.append(instruction)
        return instruction

    def _can_run(self, instruction: Instruction, done: set[Instruction]) -> bool:
        if instruction.kind is Op.FORWARD and not self._free:
            return False
        return all(needed in done for needed in instruction.dependencies(self._stages))


# The table


def _one_per_rank(ranks: int) -> int:
    return ranks


def _twice_per_rank(ranks: int) -> int:
    return 2 * ranks - 1


SCHEDULES: Mapping[str, Recipe] = {
    "gpipe": Recipe(place=_loops, order=_gpipe, summary="all forwards, then all backwards"),
    "1f1b": Recipe(place=_loops, order=_one_forward_one_backward, default_in_flight=_one_per_rank,
                   summary="one forward, one backward"),
    "interleaved": Recipe(place=_loops, order=_interleaved, min_stages=2, max_stages=None,
                          summary="1F1B over several stages a rank"),
    "zb-h1": Recipe(place=_loops, order=_one_forward_one_backward, split=True, default_in_flight=_one_per_rank,
                    summary="1F1B, backward split into I and W"),
    "zb-h2": Recipe(place=_loops, order=_one_forward_one_backward, split=True, default_in_flight=_twice_per_rank,
                    summary="backward split, more forwards in flight to hide messages"),
    "zbv": Recipe(place=_v_shape, order=_zbv, min_stages=2, max_stages=2, split=True, default_in_flight=_one_per_rank,
                  min_in_flight=_one_per_rank, summary="two stages a rank in a V, backward split"),
}
"""The training schedules, by name."""

_TORCH = {"interleaved1f1b": "interleaved", "zbvzerobubble": "zbv"}
"""torch's names, in lower case and without the prefix `Schedule`."""


def known_schedule(name: str) -> str:
    """Return the key of `SCHEDULES` for `name`, in any case, or torch's name. Raises `UsageError` for others."""
    plain = name.lower().removeprefix("schedule")
    known = _TORCH.get(plain, plain)
    if known not in SCHEDULES:
        near = nearest(name, SCHEDULES)
        raise UsageError(f"pipeline schedule: got {name!r}; {f'did you mean {near!r}? It is ' if near else 'choose '}one of "
                         f"{', '.join(SCHEDULES)}")
    return known


def make_schedule(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None,
                  in_flight: int | None = None) -> PipelineSchedule:
    """Make the schedule called `name`, in any case, or by the name of torch's class.

    `stages_per_rank` defaults to the schedule's minimum. `in_flight` is how many microbatches a rank may hold at once, None
    for the schedule's default. Raises `UsageError` for an unknown name, and for numbers that the schedule does not allow.
    """
    known = known_schedule(name)
    _at_least_one(ranks=ranks, microbatches=microbatches)
    recipe = SCHEDULES[known]
    each = recipe.min_stages if stages_per_rank is None else stages_per_rank
    if not recipe.allows_stages(each):
        low, high = recipe.min_stages, recipe.max_stages
        allowed = f"{low} or more" if high is None else f"{low}" if low == high else f"{low} to {high}"
        others = [other for other, row in SCHEDULES.items() if row.allows_stages(each)]
        raise UsageError(f"pipeline schedule {known}: stages_per_rank: got {each}; {known} takes {allowed}"
                         + (f"; with {each} choose {' or '.join(others)}" if others else ""))
    if not recipe.allows_in_flight(in_flight, ranks):
        others = ", ".join(other for other, row in SCHEDULES.items() if row.allows_in_flight(in_flight, ranks))
        raise UsageError(f"pipeline schedule {known}: in_flight: got {in_flight}; "
                         + ("its order fixes what a rank holds, so leave it out" if recipe.default_in_flight is None else
                            f"on {ranks} rank{'s' * (ranks > 1)} give {recipe.min_in_flight(ranks)} or more")
                         + (f"; or choose {others}" if others else ""))
    return recipe.make(known, ranks, microbatches, each, in_flight)


def forward_only(*, ranks: int, microbatches: int, owner: Sequence[int]) -> PipelineSchedule:
    """Make the schedule of an evaluation: each rank runs the microbatch that is at the latest stage.

    `owner` is the rank of each stage. Raises `UsageError` unless it names every rank below `ranks` and no other.
    """
    _at_least_one(ranks=ranks, microbatches=microbatches)
    if set(owner) != set(range(ranks)):
        raise UsageError(f"pipeline schedule: owner: got {tuple(owner)}; each of the ranks 0 to {ranks - 1} owns a stage, "
                         f"and no other rank does")
    stages_of = [[stage for stage in reversed(range(len(owner))) if owner[stage] == rank] for rank in range(ranks)]
    rows: list[list[Instruction]] = [[] for _ in range(ranks)]
    done = [microbatches, *[0] * len(owner)]  # microbatches that have reached each stage, and the end
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
