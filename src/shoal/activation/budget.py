"""A budget for saved tensors: the first pass measures the blocks, and each then keeps as much as the budget allows.

In the first pass one block of each kind keeps its activations, one recomputes selectively, and the others fully, which gives
the bytes of all three. Saved tensors are most at the end of forward, or while a block is recomputed in backward, when those
of later blocks are free (`peak`). So the last blocks keep first: at the time that earlier ones are recomputed, their memory
is free. All blocks recompute selectively before one keeps everything, because products take most of the time that
recomputing costs, and few of the bytes.

A pipeline has several passes in flight, of one stage or more. Its schedule gives the `Moment`s of a step: which passes rest
beside the one that runs. The budget holds at each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.activation.recompute import RecomputeMode, input_bytes, kept_bytes, recompute_blocks
from shoal.errors import ConfigError
from shoal.log import logger

__all__ = ["ALONE", "BlockBytes", "Budget", "Moment", "PassBytes", "choose", "peak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """The bytes of saved tensors of one block."""

    inputs: int
    """With full recompute."""
    selective: int
    """With selective recompute, inputs included."""
    kept: int
    """Without recompute, inputs included."""

    def resting(self, recompute: RecomputeMode) -> int:
        """Return the bytes between the forward and the backward of the block."""
        match recompute:
            case RecomputeMode.NONE:
                return self.kept
            case RecomputeMode.SELECTIVE:
                return self.selective
            case RecomputeMode.FULL:
                return self.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBytes:
    """The bytes of saved tensors of one pass through a root: the model, or a stage of a pipeline."""

    blocks: tuple[BlockBytes, ...]
    outside: int
    """Of tensors that belong to no block."""

    @property
    def kept(self) -> int:
        """Without any recompute."""
        return self.outside + sum(block.kept for block in self.blocks)

    def resting(self, choice: Sequence[RecomputeMode]) -> int:
        """Return the bytes between forward and backward, with the `choice` of each block."""
        return self.outside + sum(block.resting(each) for block, each in zip(self.blocks, choice, strict=True))

    def running(self, choice: Sequence[RecomputeMode]) -> int:
        """Return the most bytes at one time of its forward and backward, with the `choice` of each block."""
        held = most = self.outside
        for block, recompute in zip(self.blocks, choice, strict=True):
            before, held = held, held + block.resting(recompute)
            most = max(most, held, before + block.kept)  # in its backward a block has all its activations, earlier ones rest
        return most


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


def peak(passes: Sequence[PassBytes], choices: Sequence[Sequence[RecomputeMode]], moments: Iterable[Moment] = ALONE) -> int:
    """Return the most bytes of saved tensors at one of the `moments`, with the choices of each root's blocks."""
    resting = [each.resting(choice) for each, choice in zip(passes, choices, strict=True)]
    running = [each.running(choice) for each, choice in zip(passes, choices, strict=True)]
    return max((0 if moment.running is None else running[moment.running])
               + sum(count * size for count, size in zip(moment.resting, resting, strict=True))
               + sum(count * each.kept for count, each in zip(moment.whole, passes, strict=True)) for moment in moments)


def choose(passes: Sequence[PassBytes], budget: int, moments: Iterable[Moment] = ALONE) -> list[list[RecomputeMode]] | None:
    """Return by root what each block recomputes so that `peak` is at most `budget`; None where full recompute takes more."""
    choices = [[RecomputeMode.FULL] * len(each.blocks) for each in passes]
    if peak(passes, choices, moments) > budget:
        return None
    for recompute in (RecomputeMode.SELECTIVE, RecomputeMode.NONE):
        for choice in reversed(choices):
            for index in reversed(range(len(choice))):
                before, choice[index] = choice[index], recompute
                if peak(passes, choices, moments) > budget:
                    choice[index] = before
    return choices


class Budget:
    """Chooses what the blocks of a model recompute, from the bytes of its passes; never more than `limit` bytes."""

    def __init__(self, limit: int, roots: Mapping[nn.Module, Sequence[nn.Module]],
                 most_of: Callable[[list[int]], list[int]], moments: Callable[[], frozenset[Moment]] = lambda: ALONE):
        """`roots` are the modules that passes run through, with their blocks.

        `most_of` returns the largest of each number over the ranks that run the same blocks; a collective call. `moments`
        returns those of a step, which may change from step to step.
        """
        self.choices: list[list[RecomputeMode]] = []
        """The modes of each root's blocks; empty until a pass through every root is over."""
        self.expected = 0
        """The peak of saved tensors in bytes by these choices."""
        self._limit = limit
        self._roots = {root: _MeasuredRoot(blocks, most_of) for root, blocks in roots.items()}
        self._moments_of_step = moments
        self._moments = moments()
        self._running: _MeasuredRoot | None = None

    def see(self, tensor: Tensor, module: object) -> None:
        """Count a tensor that autograd saves within `module`, once for each storage and version."""
        if self._running is not None:
            self._running.see(tensor, module)

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

    def _apply(self) -> None:
        passes = [root.bytes for root in self._roots.values() if root.bytes is not None]
        if len(passes) < len(self._roots):
            return
        choices = choose(passes, self._limit, self._moments)
        if choices is None:
            least = peak(passes, [[RecomputeMode.FULL] * len(each.blocks) for each in passes], self._moments)
            raise ConfigError(f"activation_checkpointing.budget: got {self._limit:,} bytes; with every block recomputed the "
                              f"saved tensors of {self._passes} take {least:,}. Give at least that, or a smaller microbatch")
        self.choices, self.expected = choices, peak(passes, choices, self._moments)
        for root, choice in zip(self._roots.values(), choices, strict=True):
            root.set(choice)
        counts = Counter(mode for choice in choices for mode in choice)
        logger.info("activations: of %d blocks %d keep theirs, %d recompute selectively, %d fully; at most %s bytes of "
                    "saved tensors of %s are expected, of a budget of %s", counts.total(), counts[RecomputeMode.NONE],
                    counts[RecomputeMode.SELECTIVE], counts[RecomputeMode.FULL], f"{self.expected:,}", self._passes,
                    f"{self._limit:,}")

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

    def __init__(self, blocks: Sequence[nn.Module], most_of: Callable[[list[int]], list[int]]):
        self.bytes: PassBytes | None = None
        self._blocks = list(blocks)
        self._choice: list[RecomputeMode] = []
        self._places: dict[object, int] = {module: index for index, module in enumerate(self._blocks)}
        self._most_of = most_of
        self._kinds = [_kind(module) for module in self._blocks]
        self._seen: dict[tuple[int, int], StorageWeakRef] = {}
        self._sizes: Counter[object] = Counter()
        self.set([self._probe(index) for index in range(len(self._blocks))])

    def _probe(self, index: int) -> RecomputeMode:
        """Return the mode of recomputation of a block in the first pass."""
        earlier = self._kinds[:index].count(self._kinds[index])
        return (RecomputeMode.NONE, RecomputeMode.SELECTIVE, RecomputeMode.FULL)[min(earlier, 2)]

    def set(self, choice: Sequence[RecomputeMode]) -> None:
        """Have each block recompute by `choice` from its next forward on."""
        self._choice = list(choice)
        for module, recompute in zip(self._blocks, choice, strict=True):
            recompute_blocks([module], recompute)

    def see(self, tensor: Tensor, module: object) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # while it is held, no other storage has its identity
        if self._seen.setdefault((reference.cdata, tensor._version), reference) is reference:
            self._sizes[self._places.get(module, -1)] += storage.nbytes()

    def end_pass(self) -> bool:
        """Take over what a pass saved; return whether that calls for another choice."""
        seen, self._sizes = self._sizes, Counter()
        self._seen.clear()
        if not seen:  # a checkpoint of the script saves what the pass computes
            return False
        if self.bytes is None:
            self.bytes = self._measure(seen)
            self.set([RecomputeMode.FULL] * len(self._blocks))  # until all roots are measured
            return True
        if (found := sum(seen.values())) > (planned := self._planned(self.bytes)):
            self.bytes = _grown(self.bytes, found / planned)
            return True
        return False

    def _measure(self, seen: Counter[object]) -> PassBytes:
        found: dict[object, list[_Sample]] = {}
        for index, (module, kind) in enumerate(zip(self._blocks, self._kinds, strict=True)):
            mode, inputs = self._probe(index), input_bytes(module)
            if mode is RecomputeMode.SELECTIVE:
                found.setdefault((kind, mode), []).append(_Sample(bytes=seen[index] + kept_bytes(module), inputs=inputs))
                mode = RecomputeMode.FULL  # where the hooks see it, it saves its inputs
            found.setdefault((kind, mode), []).append(_Sample(bytes=seen[index], inputs=inputs))
        numbers = [min(each.scaled(input_bytes(module)) for each in found.get((kind, mode), found[kind, RecomputeMode.NONE]))
                   for module, kind in zip(self._blocks, self._kinds, strict=True)
                   for mode in (RecomputeMode.FULL, RecomputeMode.SELECTIVE, RecomputeMode.NONE)]
        *numbers, outside = self._most_of([*numbers, seen[-1]])
        return PassBytes(outside=outside, blocks=tuple(
            BlockBytes(inputs=numbers[at], selective=numbers[at + 1], kept=numbers[at + 2])
            for at in range(0, len(numbers), 3)))

    def _planned(self, measured: PassBytes) -> int:
        """Return the bytes that a pass saves where the hooks see it: of selective blocks, the inputs."""
        return measured.outside + sum(block.kept if recompute is RecomputeMode.NONE else block.inputs
                                      for block, recompute in zip(measured.blocks, self._choice, strict=True))


def _grown(measured: PassBytes, factor: float) -> PassBytes:
    """Return `factor` times the bytes: batches became larger. Each rank decides for itself."""
    return PassBytes(outside=int(measured.outside * factor) + 1, blocks=tuple(
        BlockBytes(inputs=int(each.inputs * factor) + 1, selective=int(each.selective * factor) + 1,
                   kept=int(each.kept * factor) + 1) for each in measured.blocks))


def _kind(module: nn.Module) -> object:
    return type(module), tuple(parameter.shape for parameter in module.parameters())
