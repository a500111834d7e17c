"""The global batch is microbatch x accumulation steps x data ranks; any two of the three settings give the third.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks

When only one setting is given, accumulation is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import index
from typing import SupportsIndex

from shoal.errors import ConfigError, UsageError

__all__ = ["BatchSizes", "DataRanks", "solve"]

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The batch of one optimizer step, in samples; `total == micro * accumulation * data_ranks` always holds."""

    micro: int  # samples per forward on one rank
    accumulation: int  # microbatches per step
    data_ranks: int  # ranks that see different samples

    @property
    def total(self) -> int:
        """Samples per optimizer step over all data ranks."""
        return self.micro * self.accumulation * self.data_ranks

    def with_total(self, call: str, total: object) -> BatchSizes:
        """Return the sizes of a step of `total` samples in more or fewer microbatches; `call` asks for them.

        Raises `UsageError` unless `total` is a multiple of a microbatch on every data rank.
        """
        share = self.micro * self.data_ranks
        if (count := _whole(total)) is None or count < 1 or count % share:
            raise UsageError(f"{call}: got {total!r}; it must be a multiple of {share} (microbatches of {self.micro} on "
                             f"{self.data_ranks} data ranks)")
        return replace(self, accumulation=count // share)

    def with_micro(self, call: str, micro: object) -> BatchSizes:
        """Return the sizes with microbatches of `micro` samples; `call` asks for them.

        Raises `UsageError` unless `micro` is a whole number of 1 or more.
        """
        if (count := _whole(micro)) is None or count < 1:
            raise UsageError(f"{call}: got {micro!r}; it must be 1 or more, a whole number")
        return replace(self, micro=count)


def _whole(value: object) -> int | None:
    """Return `value`, of Python or of numpy, as an int; None for anything but a whole number."""
    return None if isinstance(value, bool) or not isinstance(value, SupportsIndex) else index(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRanks:
    """The number of ranks that see different samples, and the source of that number."""

    count: int
    origin: str  # such as "WORLD_SIZE of torchrun"

    def __str__(self) -> str:
        return f"{self.count} data rank{'' if self.count == 1 else 's'}"


def solve(total: int | None, micro: int | None, accumulation: int | None, ranks: DataRanks) -> BatchSizes:
    """Return the batch sizes that satisfy the given settings; each setting is None or positive.

    Raises ConfigError when no setting is given, only `accumulation` is given, or no whole numbers satisfy the equation.
    The message shows the arithmetic and the source of the number of data ranks.
    """
    match total, micro, accumulation:
        case None, None, _:
            alone = "" if accumulation is None else f" ({ACCUMULATION} alone counts no samples)"
            raise ConfigError(f"{TOTAL}: missing; give {TOTAL} or {MICRO}{alone}")
        case None, int(), _:
            return BatchSizes(micro=micro, accumulation=accumulation or 1, data_ranks=ranks.count)
        case int(), None, _:
            micro = _quotient(total, _Factors(accumulation=accumulation, ranks=ranks))
            return BatchSizes(micro=micro, accumulation=accumulation or 1, data_ranks=ranks.count)
        case int(), int(), None:
            accumulation = _quotient(total, _Factors(micro=micro, ranks=ranks))
            return BatchSizes(micro=micro, accumulation=accumulation, data_ranks=ranks.count)
        case int(), int(), int():
            sizes = BatchSizes(micro=micro, accumulation=accumulation, data_ranks=ranks.count)
            if sizes.total != total:
                factors = _Factors(micro=micro, accumulation=accumulation, ranks=ranks)
                raise ConfigError(f"{TOTAL}: got {total}, but {factors}; {_any_two(total, sizes)}")
            return sizes
        case _:
            raise AssertionError((total, micro, accumulation))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Factors:
    """The known factors of the total."""

    ranks: DataRanks
    micro: int | None = None
    accumulation: int | None = None

    @property
    def product(self) -> int:
        return (self.micro or 1) * (self.accumulation or 1) * self.ranks.count

    def __str__(self) -> str:
        named = ((MICRO, self.micro), (ACCUMULATION, self.accumulation))
        terms = [f"{name} {size}" for name, size in named if size is not None]
        text = " x ".join([*terms, str(self.ranks)])
        product = f" = {self.product}" if terms else ""
        return f"{text}{product} (data ranks: {self.ranks.origin})"


def _quotient(total: int, factors: _Factors) -> int:
    quotient, remainder = divmod(total, factors.product)
    if remainder or quotient == 0:
        below, above = quotient * factors.product, (quotient + 1) * factors.product
        choice = f"{below} or {above}" if quotient else f"{above}"
        raise ConfigError(f"{TOTAL}: got {total}, not a multiple of {factors}; choose {choice}, or change a factor")
    return quotient


def _any_two(total: int, sizes: BatchSizes) -> str:
    accumulation, remainder = divmod(total, sizes.micro * sizes.data_ranks)
    if remainder == 0 and accumulation:
        return f"give {TOTAL} {sizes.total}, or {ACCUMULATION} {accumulation}, or only two of the three"
    return f"give {TOTAL} {sizes.total}, or only two of the three"
