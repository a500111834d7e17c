"""A batch is microbatch x accumulation x data ranks; any two of the three settings give the third.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks

Where only one is given, accumulation is 1: nothing is split that was not asked to be.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ConfigError

__all__ = ["BatchSizes", "DataRanks", "solve"]

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The batch of one optimizer step, in samples; `total == micro * accumulation * data_ranks` always."""

    micro: int  # samples per forward on one rank
    accumulation: int  # microbatches per step
    data_ranks: int  # ranks that see different samples

    @property
    def total(self) -> int:
        """Samples per optimizer step over all data ranks."""
        return self.micro * self.accumulation * self.data_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRanks:
    """How many ranks see different samples, and who said so."""

    count: int
    origin: str  # such as "WORLD_SIZE of torchrun"

    def __str__(self) -> str:
        return f"{self.count} data rank{'' if self.count == 1 else 's'}"


def solve(total: int | None, micro: int | None, accumulation: int | None, ranks: DataRanks) -> BatchSizes:
    """Return the batch that the given settings (each None or positive) have in common.

    Raises ConfigError, with the arithmetic and where the number of data ranks came from, when none is given, when only
    `accumulation` is, or when no whole numbers fit.
    """
    match total, micro, accumulation:
        case None, None, _:
            alone = "" if accumulation is None else f" ({ACCUMULATION} alone counts no samples)"
            raise ConfigError(f"{TOTAL}: missing; give {TOTAL} or {MICRO}{alone}")
        case None, int(), _:
            return BatchSizes(micro=micro, accumulation=accumulation or 1, data_ranks=ranks.count)
        case int(), None, _:
            micro = _share(total, _Factors(accumulation=accumulation, ranks=ranks))
            return BatchSizes(micro=micro, accumulation=accumulation or 1, data_ranks=ranks.count)
        case int(), int(), None:
            accumulation = _share(total, _Factors(micro=micro, ranks=ranks))
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
    """The factors of the total that are known."""

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


def _share(total: int, factors: _Factors) -> int:
    share, rest = divmod(total, factors.product)
    if rest or share == 0:
        below, above = share * factors.product, (share + 1) * factors.product
        choice = f"{below} or {above}" if share else f"{above}"
        raise ConfigError(f"{TOTAL}: got {total}, no multiple of {factors}; choose {choice}, or change a factor")
    return share


def _any_two(total: int, sizes: BatchSizes) -> str:
    forwards, rest = divmod(total, sizes.micro * sizes.data_ranks)
    if rest == 0 and forwards:
        return f"give {TOTAL} {sizes.total}, or {ACCUMULATION} {forwards}, or only two of the three"
    return f"give {TOTAL} {sizes.total}, or only two of the three"
