"""A budget for saved tensors: the first pass measures the blocks, and each then keeps as much as the budget allows.

In the first pass one block of each kind keeps its activations, one recomputes selectively, and the others fully, which gives
the bytes of all three. Where a pass fails, or skips blocks, the next one measures what is missing. Saved tensors are most at
the end of forward, or while a block is recomputed in backward, when those of later blocks are free (`peak`). So the last
blocks keep first: at the time that earlier ones are recomputed, their memory is free.

    plans, in the order in which blocks take them      bytes on the device until backward     costs
    STAYING     FULL        recompute all              inputs                                 the forward again
                SELECTIVE   recompute all but products inputs and products                    a few percent of it
                NONE        keep                       all                                    nothing
    RESTING     FULL        recompute, inputs rest     none                                   the forward again
                NONE        all rests                  none                                   bytes to and from the store
                NONE        keep                       all                                    nothing

Every block takes the second plan before one takes the third: products take most of the time that recomputing costs, and few
of the bytes; and with a store of its own (`rest`), to copy is cheaper than to compute again. A block whose tensors rest has
all of them on the device while its backward runs, and those of the block before it, which are fetched ahead.

A block that a pass calls several times counts all its calls. Backward recomputes one of them at a time, while the calls of
all other blocks may rest, for their order is not measured.

A pipeline has several passes in flight, of one stage or more. Its schedule gives the `Moment`s of a step: which passes rest
beside the one that runs. The budget holds at each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import groupby

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.activation.recompute import Calls, RecomputeMode, begin_pass, calls_in_pass, recompute_blocks
from shoal.autograd import storages
from shoal.errors import ConfigError
from shoal.log import logger

__all__ = [
    "ALONE",
    "RESTING",
    "STAYING",
    "ActivationPlan",
    "BlockBytes",
    "Budget",
    "Moment",
    "PassBytes",
    "choose",
    "describe",
    "peak",
]



class _Counted(Enum):
    """The tensors that count for a number of a block."""

    ALL = "all"
    STAYING = "those that a store does not take"
    ONE_CALL = "those of the call that saves most"


_MEASURED = {"inputs": (RecomputeMode.FULL, _Counted.ALL), "selective": (RecomputeMode.SELECTIVE, _Counted.ALL),
             "kept": (RecomputeMode.NONE, _Counted.ALL), "staying_inputs": (RecomputeMode.FULL, _Counted.STAYING),
             "staying": (RecomputeMode.NONE, _Counted.STAYING), "one_call": (RecomputeMode.NONE, _Counted.ONE_CALL)}
"""The numbers of a block: the mode in which each is measured, and what counts."""
_PROBED = RecomputeMode.NONE, RecomputeMode.SELECTIVE, RecomputeMode.FULL
"""The modes of the blocks of one kind in passes that measure: of the first, the second, and all others."""
_MOST_PROBES = 8
"""Passes after which a kind of block that has not run counts as none."""
Largest = Callable[[list[int]], list[int]]
"""Returns the largest of each number over some ranks; a collective call."""


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """How a block keeps its activations for backward."""

    recompute: RecomputeMode
    rests: bool = False
    """Saved tensors rest in a store, off the device."""

    def __str__(self) -> str:
        match self.recompute:
            case RecomputeMode.NONE:
                return "rest" if self.rests else "keep"
            case RecomputeMode.SELECTIVE:
                return "recompute selectively"
            case RecomputeMode.FULL:
                return "recompute fully, from inputs that rest" if self.rests else "recompute fully"


STAYING = ActivationPlan(RecomputeMode.FULL), ActivationPlan(RecomputeMode.SELECTIVE), ActivationPlan(RecomputeMode.NONE)
RESTING = (ActivationPlan(RecomputeMode.FULL, True), ActivationPlan(RecomputeMode.NONE, True),
           ActivationPlan(RecomputeMode.NONE))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """The bytes of saved tensors of one block, of all its calls in a pass."""

    inputs: int
    """With full recompute."""
    selective: int
    """With selective recompute, inputs included."""
    kept: int
    """Without recompute, inputs included."""
    staying_inputs: int = 0
    """Those of `inputs` that a store does not take: small tensors, and those without floating point numbers."""
    staying: int = 0
    """Those of `kept` that a store does not take."""
    one_call: int = 0
    """Without recompute, of the call that saves most; 0: of the only one."""

    @property
    def is_repeated(self) -> bool:
        """Whether a pass calls the block several times."""
        return 0 < self.one_call < self.kept

    def of_call(self, size: int) -> int:
        """Return the share of one call in `size` bytes of all."""
        return -(-size * self.one_call // self.kept) if self.is_repeated else size

    def resting(self, plan: ActivationPlan) -> int:
        """Return the bytes on the device between the forward and the backward of the block."""
        match plan.recompute:
            case RecomputeMode.NONE:
                return self.staying if plan.rests else self.kept
            case RecomputeMode.SELECTIVE:
                return self.selective
            case RecomputeMode.FULL:
                return self.staying_inputs if plan.rests else self.inputs

    def fetched(self, plan: ActivationPlan) -> int:
        """Return the bytes that a fetch ahead of its backward brings to the device."""
        return self.resting(ActivationPlan(plan.recompute)) - self.resting(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBytes:
    """The bytes of saved tensors of one pass through a root: the model, or a stage of a pipeline."""

    blocks: tuple[BlockBytes, ...]
    outside: int
    """Of tensors that belong to no block, or that others hold though they rest."""
    largest: int = 0
    """The bytes of the largest storage."""

    @property
    def kept(self) -> int:
        """Without any recompute."""
        return self.outside + sum(block.kept for block in self.blocks)

    def resting(self, choice: Sequence[ActivationPlan]) -> int:
        """Return the bytes between forward and backward, with the `choice` of each block."""
        return self.outside + sum(block.resting(each) for block, each in zip(self.blocks, choice, strict=True))

    def running(self, choice: Sequence[ActivationPlan]) -> int:
        """Return the most bytes at one time of its forward and backward, with the `choice` of each block."""
        if any(block.is_repeated for block in self.blocks):
            return self._running_in_any_order(choice)
        held = most = self.outside
        last = max((at for at, plan in enumerate(choice) if plan.rests), default=-1)
        ahead = 0  # of the last block before that rests: fetched with the next that does, and there until its backward
        for at, (block, plan) in enumerate(zip(self.blocks, choice, strict=True)):
            before, held = held, held + block.resting(plan)
            # In its backward a block has all its activations, earlier ones rest. One storage is there twice as it is copied.
            fetched = ahead + (self.largest if plan.rests else 0) if at <= last else 0
            most = max(most, held, before + block.kept + fetched)
            ahead = block.fetched(plan) if plan.rests else ahead
        return most

    def _running_in_any_order(self, choice: Sequence[ActivationPlan]) -> int:
        """Return the same where blocks are called several times: the calls of all others may rest beside one of each."""
        pairs = list(zip(self.blocks, choice, strict=True))
        held = self.resting(choice)
        ahead = max((block.of_call(block.fetched(plan)) + self.largest for block, plan in pairs if plan.rests), default=0)
        return held + ahead + max(block.of_call(block.kept) - block.of_call(block.resting(plan)) for block, plan in pairs)


@dataclass(frozen=True, slots=True)
class Moment:
    """The passes of one rank whose tensors are saved at one time, by the index of their root."""

    running: int | None
    """The root that a forward or backward runs through; None: no other passes than those below."""
    resting: tuple[int, ...]
    """By root, the number of other passes between forward and backward."""
    whole: tuple[int, ...]
    """By root, the number of passes that hold all activations: their weight gradients are to be computed."""


ALONE = frozenset({Moment(0, (0,), (0,))})
"""The moments of a model whose backward follows its forward."""


def peak(passes: Sequence[PassBytes], choices: Sequence[Sequence[ActivationPlan]], moments: Iterable[Moment] = ALONE) -> int:
    """Return the most bytes of saved tensors at one of the `moments`, with the choices of each root's blocks."""
    resting = [each.resting(choice) for each, choice in zip(passes, choices, strict=True)]
    running = [each.running(choice) for each, choice in zip(passes, choices, strict=True)]
    return max((0 if moment.running is None else running[moment.running])
               + sum(count * size for count, size in zip(moment.resting, resting, strict=True))
               + sum(count * each.kept for count, each in zip(moment.whole, passes, strict=True)) for moment in moments)


def choose(passes: Sequence[PassBytes], budget: int, moments: Iterable[Moment] = ALONE,
           plans: Sequence[ActivationPlan] = STAYING) -> list[list[ActivationPlan]] | None:
    """Return by root the plan of each block so that `peak` is at most `budget`; None where the first plan takes more."""
    choices = [[plans[0]] * len(each.blocks) for each in passes]
    if peak(passes, choices, moments) > budget:
        return None
    for plan in plans[1:]:
        for choice in reversed(choices):
            for index in reversed(range(len(choice))):
                before, choice[index] = choice[index], plan
                if peak(passes, choices, moments) > budget:
                    choice[index] = before
    return choices


def describe(measured: PassBytes, choice: Sequence[ActivationPlan]) -> str:
    """Return the plans of a root's blocks in words, with the bytes that each has on the device until backward."""
    runs: list[str] = []
    for (plan, size), group in groupby(range(len(choice)), lambda at: (choice[at], measured.blocks[at].resting(choice[at]))):
        first, *others = group
        name = f"blocks {first} to {others[-1]}" if others else f"block {first}"
        runs.append(f"{name} {plan} ({size:,} bytes each)" if others else f"{name} {_singular(plan)} ({size:,} bytes)")
    return ", ".join(runs)


def _singular(plan: ActivationPlan) -> str:
    verb, *others = str(plan).split(" ", 1)
    return " ".join([f"{verb}s", *others])


class Budget:
    """Chooses the plans of a model's blocks, from the bytes of its passes; never more than `limit` bytes on the device."""

    def __init__(self, limit: int, roots: Mapping[nn.Module, Sequence[nn.Module]], most_of: Largest, most_of_pass: Largest,
                 moments: Callable[[], frozenset[Moment]] = lambda: ALONE, plans: tuple[ActivationPlan, ...] = STAYING):
        """`roots` are the modules that passes run through, with their blocks.

        `most_of` returns the largest of each number over the ranks that run the same blocks, `most_of_pass` over those that
        compute one pass together, and so must recompute the same blocks. `moments` returns those of a step, which may
        change from step to step.
        """
        self.choices: list[list[ActivationPlan]] = []
        """The plans of each root's blocks; empty until a pass through every root is over."""
        self.expected = 0
        """The peak of saved tensors in bytes by these choices."""
        self._limit = limit
        self._plans = plans
        self._roots = {root: _MeasuredRoot(blocks, most_of, most_of_pass, rests=plans[0].rests)
                       for root, blocks in roots.items()}
        self._moments_of_step = moments
        self._moments = moments()
        self._running: _MeasuredRoot | None = None

    def see(self, tensor: Tensor, module: object, *, moves: bool = False) -> None:
        """Count a tensor that autograd saves within `module`, once for each storage and version.

        `moves` says whether a store would take it.
        """
        if self._running is not None:
            self._running.see(tensor, module, moves=moves)

    def end_forward(self) -> None:
        """Count the storages that rest and whose originals others hold at the end of forward, as the caller its batch.

        A pass whose forward did not end, by an error, is not measured.
        """
        if self._running is not None:
            self._running.end_forward()

    def recomputes(self, module: object) -> bool:
        """Whether `module` is a block that recomputes."""
        return self._running is not None and self._running.recomputes(module)

    def rests(self, module: object) -> bool:
        """Whether the tensors that `module` saves rest in a store; those of no block never do."""
        return self._running is not None and self._running.rests(module)

    def begin_pass(self, root: nn.Module) -> None:
        """Note that a pass of training through `root` begins: the one before is measured.

        Raises `ConfigError` for too small a budget.
        """
        before, self._running = self._running, self._roots[root]
        moments = self._moments_of_step()
        has_changed = moments is not self._moments
        self._moments = moments
        if (before is not None and before.end_pass()) or (has_changed and self.choices):
            self._apply()
        self._running.begin_pass()

    def _apply(self) -> None:
        passes = [root.bytes for root in self._roots.values() if root.bytes is not None]
        if len(passes) < len(self._roots):
            return
        choices = choose(passes, self._limit, self._moments, self._plans)
        if choices is None:
            least = peak(passes, [[self._plans[0]] * len(each.blocks) for each in passes], self._moments)
            raise ConfigError(f"activation_checkpointing.budget: got {self._limit:,} bytes; with every block recomputed the "
                              f"saved tensors of {self._passes} take {least:,}. Give at least that, or a smaller microbatch")
        self.choices, self.expected = choices, peak(passes, choices, self._moments)
        for root, choice in zip(self._roots.values(), choices, strict=True):
            root.set(choice)
        logger.info("activations: %s; at most %s bytes of saved tensors of %s are expected, of a budget of %s",
                    "; ".join(describe(each, choice) for each, choice in zip(passes, choices, strict=True)),
                    f"{self.expected:,}", self._passes, f"{self._limit:,}")

    @property
    def _passes(self) -> str:
        most = max(sum(moment.resting) + sum(moment.whole) + (moment.running is not None) for moment in self._moments)
        return "a pass" if most == 1 else f"{most} passes in flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """The bytes that one block saved, and those of its input."""

    bytes: int
    inputs: int

    def scaled(self, inputs: int) -> int:
        """Return the bytes for an input of another size: blocks of one kind may get more rows than the block before."""
        return self.bytes if inputs == self.inputs or not self.inputs else -(-self.bytes * inputs // self.inputs)


class _MeasuredRoot:
    """The blocks of one root, with the bytes that a pass through it saves."""

    def __init__(self, blocks: Sequence[nn.Module], most_of: Largest, most_of_pass: Largest, *, rests: bool):
        self.bytes: PassBytes | None = None
        self._blocks = list(blocks)
        self._choice: list[ActivationPlan] = []
        self._rests = rests
        self._places: dict[object, int] = {module: index for index, module in enumerate(self._blocks)}
        self._most_of, self._most_of_pass = most_of, most_of_pass
        self._kinds = [_kind(module) for module in self._blocks]
        self._seen: dict[tuple[int, int], StorageWeakRef] = {}
        self._rested: list[tuple[StorageWeakRef, int]] = []
        self._sizes: Counter[int] = Counter()
        self._staying: Counter[int] = Counter()
        self._of_calls: Counter[tuple[int, int]] = Counter()
        """The bytes that each call of each block saved."""
        self._largest = self._held = 0
        self._concluded = False
        self._samples: dict[tuple[object, RecomputeMode, _Counted], list[_Sample]] = {}
        self._calls: dict[int, Calls] = {}
        """The calls of each block that ran, in the last pass in which it did."""
        self._outside = self._probes = 0
        self._probe(range(len(self._blocks)))

    def begin_pass(self) -> None:
        """Forget what a pass that did not end has saved."""
        self._concluded = False
        self._sizes, self._staying, self._held, self._rested = Counter(), Counter(), 0, []
        self._of_calls.clear()
        self._seen.clear()
        begin_pass(self._blocks)

    def _probe(self, order: Iterable[int]) -> None:
        """Let the first block of each kind in `order` keep its activations, and the second recompute selectively."""
        earlier: Counter[object] = Counter()
        plans: dict[int, ActivationPlan] = {}
        for index in order:
            mode = _PROBED[min(earlier[self._kinds[index]], len(_PROBED) - 1)]
            plans[index] = ActivationPlan(mode, self._rests)
            earlier[self._kinds[index]] += 1
        self.set([plans[index] for index in range(len(self._blocks))])

    def set(self, choice: Sequence[ActivationPlan]) -> None:
        """Have each block follow its plan from its next forward on."""
        self._choice = list(choice)
        for module, plan in zip(self._blocks, choice, strict=True):
            recompute_blocks([module], plan.recompute)

    def recomputes(self, module: object) -> bool:
        """Whether a module recomputes."""
        place = self._places.get(module)
        return place is not None and self._choice[place].recompute is not RecomputeMode.NONE

    def rests(self, module: object) -> bool:
        """Whether the tensors that a module saves rest."""
        place = self._places.get(module)
        return place is not None and self._choice[place].rests

    def see(self, tensor: Tensor, module: object, *, moves: bool) -> None:
        for storage in storages(tensor):
            reference = StorageWeakRef(storage)  # while it is held, no other storage has its identity
            if self._seen.setdefault((reference.cdata, tensor._version), reference) is not reference:
                continue
            place, size = self._places.get(module, -1), storage.nbytes()
            self._sizes[place] += size
            self._staying[place] += 0 if moves else size
            if self.bytes is None and place >= 0:
                self._of_calls[place, calls_in_pass(self._blocks[place]).count] += size
            if moves and self.rests(module):
                self._rested.append((reference, size))
            self._largest = max(self._largest, size)

    def end_forward(self) -> None:
        """Count what rests and is held by others all the same."""
        self._concluded = True
        rested, self._rested = self._rested, []
        self._held += sum(size for reference, size in rested if not reference.expired())

    def end_pass(self) -> bool:
        """Take over what a pass saved; return whether that calls for another choice."""
        seen, held, failed = self._sizes, self._held, not self._concluded
        if not seen and not failed:  # a checkpoint of the script saves what the pass computes
            return False
        if self.bytes is None:  # a pass may fail on one rank, and skip other blocks: all take the same decision
            failed, lacks = self._most_of([failed, not failed and self._sample()])
            if failed or (lacks and self._probes < _MOST_PROBES):
                return False
            self.bytes = self._measured()
            self.set([ActivationPlan(RecomputeMode.FULL, self._rests)] * len(self._blocks))  # until all roots are measured
            return True
        products = sum(calls_in_pass(module).kept for module in self._blocks)  # no hook sees them
        found, = self._most_of_pass([0 if failed else sum(seen.values()) + held + products])
        if found > (planned := self._planned(self.bytes)):
            self.bytes = _grown(self.bytes, found / max(planned, 1))
            return True
        return False

    def _sample(self) -> bool:
        """Take samples of the blocks that ran; return whether a kind lacks one, for LayerDrop or an error skips blocks."""
        self._probes += 1
        ran: list[int] = []
        for index, (module, kind, plan) in enumerate(zip(self._blocks, self._kinds, self._choice, strict=True)):
            mode, calls = plan.recompute, calls_in_pass(module)
            if not calls.inputs and not self._sizes[index]:
                continue
            ran.append(index)
            self._calls[index] = calls
            if mode is RecomputeMode.SELECTIVE:
                self._samples.setdefault((kind, mode, _Counted.ALL), []).append(
                    _Sample(bytes=self._sizes[index] + calls.kept, inputs=calls.inputs))
                mode = RecomputeMode.FULL  # where the hooks see it, it saves its inputs
            one_call = max((size for (place, _), size in self._of_calls.items() if place == index), default=0)
            for counted, size, inputs in ((_Counted.ALL, self._sizes[index], calls.inputs),
                                          (_Counted.STAYING, self._staying[index], calls.inputs),
                                          (_Counted.ONE_CALL, one_call, calls.largest)):
                self._samples.setdefault((kind, mode, counted), []).append(_Sample(bytes=size, inputs=inputs))
        self._outside = max(self._outside, self._sizes[-1] + self._held)
        self._probe([*ran, *(index for index in range(len(self._blocks)) if index not in ran)])
        counts = Counter(self._kinds)
        return any((kind, mode, _Counted.ALL) not in self._samples for kind in counts for mode in _PROBED[:counts[kind]])

    def _measured(self) -> PassBytes:
        """Return the bytes of each block in each mode, the most over the ranks; 0 for a kind that never ran."""
        most = {kind: Calls(inputs=max(found.inputs for found in ran), largest=max(found.largest for found in ran))
                for kind in self._kinds if (ran := [self._calls[index] for index, each in enumerate(self._kinds)
                                                    if each == kind and index in self._calls])}
        calls = [self._calls.get(index) or most.get(kind, Calls()) for index, kind in enumerate(self._kinds)]
        numbers = [min(each.scaled(found.largest if counted is _Counted.ONE_CALL else found.inputs)
                       for each in self._samples.get((kind, mode, counted), self._samples.get(
                           (kind, RecomputeMode.NONE, counted), [_Sample(bytes=0, inputs=0)])))
                   for found, kind in zip(calls, self._kinds, strict=True) for mode, counted in _MEASURED.values()]
        place = [*_MEASURED].index("inputs")  # of a block that recomputes they are there, whoever else saved them
        for index, found in enumerate(calls):
            at = index * len(_MEASURED) + place
            numbers[at] = max(numbers[at], found.inputs)
        *numbers, outside, largest = self._most_of([*numbers, self._outside, self._largest])
        return PassBytes(outside=outside, largest=largest, blocks=tuple(
            BlockBytes(**dict(zip(_MEASURED, numbers[at:at + len(_MEASURED)], strict=True)))
            for at in range(0, len(numbers), len(_MEASURED))))

    def _planned(self, measured: PassBytes) -> int:
        """Return the bytes that a pass saves, rest where they may."""
        return measured.outside + sum(block.resting(ActivationPlan(plan.recompute))
                                      for block, plan in zip(measured.blocks, self._choice, strict=True))


def _grown(measured: PassBytes, factor: float) -> PassBytes:
    """Return `factor` times the bytes: batches became larger."""
    def grown(size: int) -> int:
        return int(size * factor) + 1

    return PassBytes(outside=grown(measured.outside), largest=grown(measured.largest), blocks=tuple(
        BlockBytes(**{name: grown(size) for name, size in asdict(each).items()}) for each in measured.blocks))


def _kind(module: nn.Module) -> object:
    return type(module), tuple(parameter.shape for parameter in module.parameters())
