"""An elastic batch is one global batch that many numbers of ranks can divide; each number has its own accumulation.

    batch = micro-batch x accumulation x data ranks        for every valid number of data ranks

Candidates are the products of a micro-batch (or the least common multiple of all) and the largest highly composite number
that keeps them within the cap: such a number has more divisors than any smaller one, so it fits the most sizes. This is
DeepSpeed's published rule (its elasticity, versions 0.1 and 0.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm

from shoal.errors import ConfigError
from shoal.resilience.settings import ElasticitySettings

__all__ = ["ElasticBatch", "WorldSizeError", "elastic_batch", "valid_sizes"]


class WorldSizeError(ConfigError):
    """An elastic job cannot run on this number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticBatch:
    """The global batch of an elastic job."""

    total: int
    """Samples of an optimizer step."""
    sizes: tuple[int, ...]
    """The numbers of data ranks at which the job may run, ascending."""
    micro: int | None = None
    """Samples of a forward on one rank, at the number of ranks that was asked for; None: none was, or none fits."""


def elastic_batch(settings: ElasticitySettings, data_ranks: int | None = None) -> ElasticBatch:
    """Return the batch of `settings`, with the micro-batch of `data_ranks`.

    Version 0.2 makes a batch for the present number where that is not valid, and so needs it. Raises `WorldSizeError` for
    a number of ranks that is not valid.
    """
    if settings.version == 0.1:
        return _of_ranks(settings, data_ranks)
    if data_ranks is None:
        raise WorldSizeError("elasticity.version: 0.2 needs the number of ranks; give it, or choose 0.1")
    return _of_nodes(settings, data_ranks)


def valid_sizes(total: int, micros: Sequence[int], least: int, most: int) -> list[int]:
    """Return the numbers of ranks from `least` to `most` that divide a batch of `total` into steps of some micro-batch."""
    return sorted({ranks for micro in micros if total % micro == 0 for ranks in _divisors(total // micro)
                   if least <= ranks <= most})


def _of_ranks(settings: ElasticitySettings, data_ranks: int | None) -> ElasticBatch:
    micros = settings.micro_batch_sizes
    batch = _best(settings, settings.max_train_batch_size, settings.min_gpus, settings.max_gpus)
    if data_ranks is None:
        return batch
    if data_ranks not in batch.sizes:
        raise WorldSizeError(f"elasticity: {data_ranks} data ranks cannot share a batch of {batch.total} in micro-batches "
                             f"of {_listed(micros)}; run on {_listed(batch.sizes)}, or change max_train_batch_size or "
                             f"micro_batch_sizes")
    fits = [micro for micro in micros if batch.total // data_ranks % micro == 0]
    return ElasticBatch(total=batch.total, sizes=batch.sizes, micro=max(fits))


def _of_nodes(settings: ElasticitySettings, data_ranks: int) -> ElasticBatch:
    node = settings.num_gpus_per_node // settings.model_parallel_size
    nodes = _best(settings, settings.max_train_batch_size // node, settings.min_gpus // node, settings.max_gpus // node)
    batch = ElasticBatch(total=nodes.total * node, sizes=tuple(size * node for size in nodes.sizes))
    if data_ranks not in batch.sizes:
        # Only micro-batches that fit: for others the published rule makes a batch of 0, and prefers it as the smallest
        smallest = [micro * data_ranks for micro in settings.micro_batch_sizes
                    if micro * data_ranks <= settings.max_train_batch_size]
        made = [settings.max_train_batch_size // each * each for each in smallest]
        if not made:
            raise WorldSizeError(f"elasticity: {data_ranks} data ranks cannot share a batch of at most "
                                 f"{settings.max_train_batch_size} in micro-batches of "
                                 f"{_listed(settings.micro_batch_sizes)}; raise max_train_batch_size, or run on "
                                 f"{_listed(batch.sizes)}")
        batch = ElasticBatch(total=max(made) if settings.prefer_larger_batch else min(made), sizes=(data_ranks,))
    fits = [micro for micro in settings.micro_batch_sizes if batch.total // data_ranks % micro == 0]
    micro = (max(fits) if settings.prefer_larger_batch else fits[0]) if fits else None
    return ElasticBatch(total=batch.total, sizes=batch.sizes, micro=micro)


def _best(settings: ElasticitySettings, cap: int, least: int, most: int) -> ElasticBatch:
    """Return the candidate up to `cap` that fits the most numbers of ranks."""
    micros = settings.micro_batch_sizes
    if max(micros) > cap:
        raise ConfigError(f"elasticity.micro_batch_sizes: got {max(micros)}, above the {cap} samples that "
                          f"max_train_batch_size leaves for one rank of each node; give smaller ones, or raise it")
    bases = {*micros, lcm(*micros)}
    candidates = {base * _largest_highly_composite(cap // base) for base in bases if base <= cap}
    sign = 1 if settings.prefer_larger_batch else -1
    sizes = {total: tuple(valid_sizes(total, micros, least, most)) for total in candidates}
    total = max(candidates, key=lambda total: (len(sizes[total]), sign * total))
    if not sizes[total]:
        raise WorldSizeError(f"elasticity: no batch of at most {settings.max_train_batch_size} fits {settings.min_gpus} to "
                             f"{settings.max_gpus} ranks in micro-batches of {_listed(micros)}; lower min_gpus, or raise "
                             f"max_train_batch_size")
    return ElasticBatch(total=total, sizes=sizes[total])


def _largest_highly_composite(limit: int) -> int:
    return max(number for number in _highly_composite(limit.bit_length()) if number <= limit)


@cache
def _highly_composite(bits: int) -> tuple[int, ...]:
    """Return the numbers below 2**`bits` that have more divisors than every smaller number.

    The exponents of the primes 2, 3, 5, ... in such a number never rise, so only those products are compared.
    """
    best, found = 0, list[int]()
    for number, divisors in sorted(_products((2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37), 1 << bits, bits)):
        if divisors > best:
            best = divisors
            found.append(number)
    return tuple(found)


def _products(primes: Sequence[int], limit: int, exponent: int) -> Iterator[tuple[int, int]]:
    """Yield the products below `limit` of powers of `primes` with exponents that never rise, and their divisors' number."""
    yield 1, 1
    power = 1
    for times in range(1, exponent + 1):
        power *= primes[0]
        if power >= limit:
            return
        rest = _products(primes[1:], -(-limit // power), times) if primes[1:] else [(1, 1)]
        yield from ((power * number, (times + 1) * divisors) for number, divisors in rest)


def _divisors(number: int) -> set[int]:
    small = {each for each in range(1, int(number**0.5) + 1) if number % each == 0}
    return small | {number // each for each in small}


def _listed(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:10], "...", shown[-1]])
