"""Four dtypes decide the precision of training; each has one default and is chosen in one place.

    compute      weights and activations in forward and backward    the model's dtype, or 16-bit by fp16 / bf16
    reduce       gradients on the wire between ranks                compute
    accumulate   gradients at rest between microbatches             compute
    master       the copy of the weights that the optimizer steps   fp32; fp64 for an fp64 model

The two 16-bit formats never meet in one policy: fp16 cannot hold the range of bf16 gradients (they are not scaled), and
bf16 drops three of fp16's eleven significant bits.

`Averaging` decides where the mean over ranks is divided: before the sum, after it, or on both sides.

    prescale              before     after
    true                  mean       1            no partial sum exceeds the largest addend: no overflow
    false                 1          mean         addends keep their magnitude: no underflow
    null, fp32 or wider   mean       1            fused into the copy that collects a gradient, where it is free
    null, 16 bits         1          mean         after the sum, which gloo computes in fp32; but
                          mean       1            where the sum is computed in 16 bits, as by NCCL: it might overflow
    predivide f           1 / f      f mean       part of the division on each side

Only the factors differ: powers of two give the same bits on either side, unless something overflows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shoal.config.section import DTYPE_SPELLINGS
from shoal.errors import ConfigError

__all__ = ["DTYPES", "Averaging", "Factors", "Policy", "dtype_named", "policy"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""The dtypes that a configuration may name, by their names in `DTYPE_SPELLINGS`."""
_SHORT = {torch.float64: "fp64"} | {dtype: name for name, dtype in DTYPES.items()}
_HALVES = {torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The factor on every addend of a sum, and the factor on the sum."""

    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """Where the mean over ranks is divided."""

    prescale: bool | None = None
    """Divide before the sum, or after it; None: where it is free and loses no precision."""
    predivide: float | None = None
    """Divide by this before the sum, and by the rest after it; None: the division is not split."""
    wide: bool = True
    """Whether sums of 16-bit addends are computed in fp32."""
    times: int = 1
    """A factor on the mean: the number of data ranks turns the mean into a sum."""

    def is_before(self, *, accumulate: torch.dtype, wire: torch.dtype) -> bool:
        """Whether the whole division precedes the sum, for gradients accumulated and sent in these dtypes."""
        if self.prescale is not None or self.predivide is not None:
            return self.prescale is True
        if wire.itemsize < torch.float32.itemsize:
            return not self.wide
        return accumulate == wire

    def factors(self, addends: int, *, accumulate: torch.dtype, wire: torch.dtype) -> Factors:
        """Return the factors of the mean of `addends`, for gradients accumulated and sent in these dtypes."""
        mean = self.times / addends
        if self.is_before(accumulate=accumulate, wire=wire):
            return Factors(before=mean, after=1.0)
        part = self.predivide or 1.0
        return Factors(before=1 / part, after=part * mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The dtypes of one engine; build it with `policy`, which checks the combination."""

    compute: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype
    master: torch.dtype
    averaging: Averaging = field(default_factory=Averaging)
    """Where the mean over ranks is divided."""


def dtype_named(name: str | torch.dtype, *, key: str) -> torch.dtype:
    """Return the dtype that a configuration value names, in any case: fp32, fp16, bf16 and their long forms.

    `key` is the configuration path for the error. Raises `ConfigError` for any other name.
    """
    if isinstance(name, torch.dtype):
        return name
    try:
        return DTYPES[DTYPE_SPELLINGS[name.lower()]]
    except KeyError:
        raise ConfigError(f"{key}: got {name!r}; choose one of {', '.join(DTYPE_SPELLINGS)}") from None


def policy(*, fp16: bool = False, bf16: bool = False, communication_data_type: str | torch.dtype | None = None,
           grad_accum_dtype: str | torch.dtype | None = None, model_dtype: torch.dtype = torch.float32,
           averaging: Averaging | None = None) -> Policy:
    """Build the policy of a model of `model_dtype` from the configuration's flags.

    Raises `ConfigError` for combinations that cannot train: fp16 with bf16, the two 16-bit formats mixed, or a 16-bit
    model without the flag that gives it master weights.
    """
    compute = _compute(fp16, bf16, model_dtype)
    reduce = _gradient("communication_data_type", communication_data_type, compute)
    accumulate = _gradient("data_types.grad_accum_dtype", grad_accum_dtype, compute)
    if {reduce, accumulate} == _HALVES:
        raise ConfigError(f"communication_data_type: got {_SHORT[reduce]} with data_types.grad_accum_dtype "
                          f"{_SHORT[accumulate]}; the two 16-bit formats cannot be mixed: choose one of them, or fp32")
    master = torch.float64 if model_dtype == torch.float64 else torch.float32
    return Policy(compute=compute, reduce=reduce, accumulate=accumulate, master=master,
                  averaging=averaging or Averaging())


def _compute(fp16: bool, bf16: bool, model: torch.dtype) -> torch.dtype:
    if fp16 and bf16:
        raise ConfigError("fp16.enabled and bf16.enabled: got true for both; enable one of them")
    if model not in _SHORT:
        raise ConfigError(f"model: its parameters are {model}; training needs fp64, fp32, fp16 or bf16 parameters")
    if fp16:
        return torch.float16
    if bf16:
        return torch.bfloat16
    if model in _HALVES:
        flag = f"{_SHORT[model]}.enabled"
        raise ConfigError(f"{flag}: got false for a model whose parameters are {_SHORT[model]}, so it would have no "
                          f"fp32 master weights; set {flag} to true, or call model.float() first")
    return model


def _gradient(key: str, name: str | torch.dtype | None, compute: torch.dtype) -> torch.dtype:
    if name is None:
        return compute
    dtype = dtype_named(name, key=key)
    if {dtype, compute} == _HALVES:
        raise ConfigError(f"{key}: got {_SHORT[dtype]} with {_SHORT[compute]}.enabled; the two 16-bit formats cannot "
                          f"be mixed: choose {_SHORT[compute]} or fp32")
    return dtype
