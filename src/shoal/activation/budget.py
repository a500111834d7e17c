"""A budget for saved tensors: the first pass measures the blocks, and each then keeps as much as the budget allows.

In the first pass one block of each kind keeps its activations, one recomputes selectively, and the others fully, which gives
the bytes of all three. Saved tensors are most at the end of forward, or while a block is recomputed in backward, when those
of later blocks are free (`peak`). So the last blocks keep first: at the time that earlier ones are recomputed, their memory
is free. All blocks recompute selectively before one keeps everything, because products take most of the time that
recomputing costs, and few of the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.activation.recompute import RecomputeMode, kept_bytes, recompute_blocks
from shoal.errors import ConfigError
from shoal.log import logger

__all__ = ["BlockBytes", "Budget", "choose", "peak"]


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


def peak(blocks: Sequence[BlockBytes], choice: Sequence[RecomputeMode], outside: int) -> int:
    """Return the most bytes of saved tensors at one time, of which `outside` belong to no block."""
    held = most = outside
    for block, recompute in zip(blocks, choice, strict=True):
        before, held = held, held + block.resting(recompute)
        most = max(most, held, before + block.kept)  # in its backward a block has all its activations, and earlier ones rest
    return most


def choose(blocks: Sequence[BlockBytes], outside: int, budget: int) -> list[RecomputeMode] | None:
    """Return for each block what it recomputes so that `peak` is at most `budget`; None where full recompute takes more."""
    choice = [RecomputeMode.FULL] * len(blocks)
    if peak(blocks, choice, outside) > budget:
        return None
    for recompute in (RecomputeMode.SELECTIVE, RecomputeMode.NONE):
        for index in reversed(range(len(blocks))):
            tried = [*choice[:index], recompute, *choice[index + 1:]]
            if peak(blocks, tried, outside) <= budget:
                choice = tried
    return choice


class Budget:
    """Chooses what the blocks of a model recompute, from the bytes of its passes; never more than `limit` bytes."""

    def __init__(self, limit: int, blocks: Sequence[nn.Module], most_of: Callable[[list[int]], list[int]]):
        """`most_of` returns the largest of each number over the ranks that run the same blocks; a collective call."""
        self.choice: list[RecomputeMode] = []
        """The mode of each block; empty until the first pass is over."""
        self.expected = 0
        """The peak of saved tensors in bytes by this choice."""
        self._limit = limit
        self._blocks = list(blocks)
        self._places: dict[object, int] = {module: index for index, module in enumerate(self._blocks)}
        self._most_of = most_of
        self._kinds = [_kind(module) for module in self._blocks]
        self._measured: list[BlockBytes] = []
        self._outside = 0
        self._seen: dict[tuple[int, int], StorageWeakRef] = {}
        self._bytes: Counter[object] = Counter()
        for index, module in enumerate(self._blocks):
            recompute_blocks([module], self._probe(index))

    def _probe(self, index: int) -> RecomputeMode:
        """Return the mode of recomputation of a block in the first pass."""
        earlier = self._kinds[:index].count(self._kinds[index])
        return (RecomputeMode.NONE, RecomputeMode.SELECTIVE, RecomputeMode.FULL)[min(earlier, 2)]

    def see(self, tensor: Tensor, module: object) -> None:
        """Count a tensor that autograd saves within `module`, once for each storage and version."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # while it is held, no other storage has its identity
        if self._seen.setdefault((reference.cdata, tensor._version), reference) is reference:
            self._bytes[self._places.get(module, -1)] += storage.nbytes()

    def begin_pass(self) -> None:
        """Note that a pass of training begins: the one before is measured. Raises `ConfigError` for too small a budget."""
        seen, self._bytes = self._bytes, Counter()
        self._seen.clear()
        if not seen:
            return
        if not self._measured:
            self._measure(seen)
            self._apply()
        elif (found := sum(seen.values())) > (planned := self._planned()):
            self._grow(found / planned)
            self._apply()

    def _measure(self, seen: Counter[object]) -> None:
        kept: dict[object, int] = {}
        selective: dict[object, int] = {}
        for index, kind in enumerate(self._kinds):
            match self._probe(index):
                case RecomputeMode.NONE:
                    kept[kind] = seen[index]
                case RecomputeMode.SELECTIVE:
                    selective[kind] = seen[index] + kept_bytes(self._blocks[index])
                case RecomputeMode.FULL:
                    pass
        inputs = {kind: min((seen[index] for index, other in enumerate(self._kinds)
                             if other == kind and self._probe(index) is not RecomputeMode.NONE), default=kept[kind])
                  for kind in kept}
        numbers = [value for kind in self._kinds for value in (inputs[kind], selective.get(kind, kept[kind]), kept[kind])]
        *numbers, self._outside = self._most_of([*numbers, seen[-1]])
        self._measured = [BlockBytes(inputs=numbers[at], selective=numbers[at + 1], kept=numbers[at + 2])
                          for at in range(0, len(numbers), 3)]

    def _planned(self) -> int:
        """Return the bytes that a pass saves where the hooks see it: of selective blocks, the inputs."""
        return self._outside + sum(block.kept if recompute is RecomputeMode.NONE else block.inputs
                                   for block, recompute in zip(self._measured, self.choice, strict=True))

    def _grow(self, factor: float) -> None:
        """Expect `factor` times the bytes from now on: batches became larger. Each rank decides for itself."""
        self._outside = int(self._outside * factor) + 1
        self._measured = [BlockBytes(inputs=int(each.inputs * factor) + 1, selective=int(each.selective * factor) + 1,
                                     kept=int(each.kept * factor) + 1) for each in self._measured]

    def _apply(self) -> None:
        choice = choose(self._measured, self._outside, self._limit)
        if choice is None:
            least = peak(self._measured, [RecomputeMode.FULL] * len(self._measured), self._outside)
            raise ConfigError(f"activation_checkpointing.budget: got {self._limit:,} bytes; with every block recomputed the "
                              f"saved tensors of a pass take {least:,}. Give at least that, or a smaller microbatch")
        self.choice, self.expected = choice, peak(self._measured, choice, self._outside)
        for module, recompute in zip(self._blocks, choice, strict=True):
            recompute_blocks([module], recompute)
        counts = Counter(choice)
        logger.info("activations: of %d blocks %d keep theirs, %d recompute selectively, %d fully; at most %s bytes of "
                    "saved tensors are expected, of a budget of %s", len(choice), counts[RecomputeMode.NONE],
                    counts[RecomputeMode.SELECTIVE], counts[RecomputeMode.FULL], f"{self.expected:,}", f"{self._limit:,}")


def _kind(module: nn.Module) -> object:
    return type(module), tuple(parameter.shape for parameter in module.parameters())
