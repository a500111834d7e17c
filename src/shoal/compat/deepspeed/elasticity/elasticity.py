"""The published functions of elasticity, over `shoal.resilience.elastic`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from shoal.compat import environment
from shoal.config.load import read
from shoal.config.resolve import resolve
from shoal.errors import ConfigError
from shoal.resilience.elastic import WorldSizeError, elastic_batch
from shoal.resilience.settings import ElasticitySettings

__all__ = ["ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize", "compute_elastic_config",
           "elasticity_enabled", "ensure_immutable_elastic_config", "refuse_other_batch"]

SECTION = "elasticity"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MINIMUM_VERSION = (0, 3, 8)


class ElasticityError(Exception):
    """The base of the errors of elasticity."""


class ElasticityConfigError(ElasticityError):
    """The section `elasticity` is missing, or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The job cannot run on this number of ranks."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the configuration has the section, and it is enabled."""
    return bool(ds_config.get(SECTION, {}).get("enabled", False))


def compute_elastic_config(ds_config: Mapping[str, Any] | str, target_deepspeed_version: str, world_size: int = 0,
                           return_microbatch: bool = False) -> tuple[Any, ...]:
    """Return the global batch and the valid numbers of ranks; with `world_size` or `return_microbatch` the micro-batch too.

    Version 0.2 takes the number of ranks from WORLD_SIZE where `world_size` is 0. Raises the published errors.
    """
    given = read(ds_config)
    if SECTION not in given:
        raise ElasticityConfigError(f"{SECTION}: missing from the configuration; add the section")
    if not elasticity_enabled(given):
        raise ElasticityConfigError(f"{SECTION}.enabled: got false; give true")
    _check_version(target_deepspeed_version)
    found = resolve(ElasticitySettings, cast("Mapping[str, object]", given[SECTION]))
    if found.findings.problems:
        problems = "; ".join(f"{SECTION}.{problem.path}: {problem.message}" for problem in found.findings.problems)
        too_large = any("above max_train_batch_size" in problem.message for problem in found.findings.problems)
        raise (ValueError if too_large else ElasticityConfigError)(problems)
    settings = found.section
    ranks = world_size or (environment.number("WORLD_SIZE", default=0) if settings.version == 0.2 else 0)
    if settings.version == 0.2 and not ranks:
        raise ElasticityConfigError(f"{SECTION}.version: 0.2 needs the number of ranks; give world_size, or set WORLD_SIZE")
    try:
        batch = elastic_batch(settings, ranks // settings.model_parallel_size or None)
    except WorldSizeError as error:
        raise ElasticityIncompatibleWorldSize(str(error)) from error
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from error
    facts = (batch.total, list(batch.sizes))
    return (*facts, batch.micro) if world_size or return_microbatch else facts


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Raise `ElasticityConfigError` unless the section is the one that a scheduler put in DEEPSPEED_ELASTICITY_CONFIG."""
    try:
        scheduled = environment.elasticity_config()
    except ValueError as error:
        raise ElasticityConfigError(f"DEEPSPEED_ELASTICITY_CONFIG: got what is no JSON ({error}); set it to the section "
                                    f"{SECTION}, or unset it") from None
    if scheduled is None:
        return
    for key in ("max_train_batch_size", "micro_batch_sizes", "version"):
        if scheduled.get(key) != runtime_elastic_config_dict.get(key):
            raise ElasticityConfigError(f"{SECTION}.{key}: got {runtime_elastic_config_dict.get(key)!r}, and the scheduler "
                                        f"planned for {scheduled.get(key)!r} (DEEPSPEED_ELASTICITY_CONFIG); give the same")


def refuse_other_batch(ds_config: Mapping[str, Any]) -> None:
    """Raise `ElasticityConfigError` for batch sizes beside an enabled section that does not ignore them."""
    beside = [key for key in BATCH_KEYS if ds_config.get(key) is not None]
    if elasticity_enabled(ds_config) and beside and not ds_config[SECTION].get("ignore_non_elastic_batch_info", False):
        raise ElasticityConfigError(f"{SECTION}: got {', '.join(beside)} beside it; remove them, or set "
                                    f"{SECTION}.ignore_non_elastic_batch_info to true")


def _check_version(text: str) -> None:
    numbers = tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdecimal())
    if numbers < MINIMUM_VERSION:
        raise ElasticityError(f"target_deepspeed_version: got {text!r}; elasticity begins with 0.3.8")
