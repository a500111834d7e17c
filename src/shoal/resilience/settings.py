"""The sections `elasticity` (as published) and `resilience` of the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from shoal.config.section import Conflict, Count, Number, Positive, Section, Switch

__all__ = ["ElasticitySettings", "GuardSettings", "ResilienceSettings", "VaultSettings"]


class ElasticitySettings(Section):
    """Batch sizes of a job whose number of ranks changes: the global batch stays, and the accumulation changes."""

    enabled: Switch = False
    """Derive the batch sizes from this section, for the present number of data ranks."""

    max_train_batch_size: Positive = 2000
    """The largest global batch. Required where `enabled`."""

    micro_batch_sizes: Annotated[list[Positive], Field(min_length=1)] = Field(default=[2, 4, 6])
    """The microbatches that a rank may run. Required where `enabled`."""

    min_gpus: Positive = 1
    """The fewest ranks at which the job may run."""

    max_gpus: Positive = 10000
    """The most ranks at which the job may run."""

    min_time: Count = 0
    """Minutes that the job is meant to run at one size; a scheduler may read it, training does not."""

    prefer_larger_batch: Switch = True
    """Of batches that fit equally many sizes, choose the largest; false: the smallest. Version 0.2 chooses microbatches
    likewise."""

    ignore_non_elastic_batch_info: Switch = False
    """Ignore the batch sizes at the top level; false: refuse other ones than this section gives."""

    version: Annotated[Number, Field(ge=0.1, le=0.2)] = 0.2
    """0.1 counts data ranks; 0.2 counts nodes, of `num_gpus_per_node` ranks each."""

    num_gpus_per_node: Positive = 1
    """Ranks of a node, for version 0.2."""

    model_parallel_size: Positive = 1
    """Ranks that share one copy of the model, for version 0.2; it divides `num_gpus_per_node`."""

    aliases: ClassVar[Mapping[str, str]] = {"prefer_large_batch": "prefer_larger_batch"}

    def conflicts(self) -> Iterable[Conflict]:
        if not self.enabled:
            return
        for key in ("max_train_batch_size", "micro_batch_sizes"):
            if key not in self.model_fields_set:
                yield Conflict(keys=(key, "enabled"), message="missing, and enabled is true; give it")
        if self.min_gpus > self.max_gpus:
            yield Conflict(keys=("min_gpus", "max_gpus"),
                           message=f"got {self.min_gpus} beside max_gpus {self.max_gpus}; give at most that")
        if self.num_gpus_per_node % self.model_parallel_size:
            yield Conflict(keys=("model_parallel_size", "num_gpus_per_node"),
                           message=f"got {self.model_parallel_size}, which does not divide num_gpus_per_node "
                                   f"{self.num_gpus_per_node}; give a divisor")
        if self.version not in (0.1, 0.2):
            yield Conflict(keys=("version",), message=f"got {self.version:g}; choose 0.1 or 0.2")
        if self.version == 0.1 and self.model_parallel_size > 1:
            yield Conflict(keys=("version", "model_parallel_size"),
                           message=f"got 0.1, which counts data ranks only, beside model_parallel_size "
                                   f"{self.model_parallel_size}; give 0.2")
        largest = max(self.micro_batch_sizes)
        if largest > self.max_train_batch_size:
            yield Conflict(keys=("micro_batch_sizes", "max_train_batch_size"),
                           message=f"got {largest}, above max_train_batch_size {self.max_train_batch_size}; give less")


class VaultSettings(Section):
    """Copies of the training state in the memory of the agent of `shoal run`, which outlive the ranks."""

    every: Positive | None = None
    """Steps between two copies: a restart loses at most so many; null: no copies. (Shoal only.)"""


class GuardSettings(Section):
    """Steps whose loss or gradient norm is an outlier are refused, replayed once, and skipped if the data is at fault."""

    enabled: Switch = False
    """Judge each step before it changes a weight. A step reads its loss and norm on the host, and gathers three numbers of
    each rank; each rank reads its gradients once more. (Shoal only.)"""

    window: Annotated[Positive, Field(ge=8)] = 64
    """Accepted steps that a value is compared with. (Shoal only.)"""

    deviations: Annotated[Number, Field(gt=0)] = 50.0
    """A value is an outlier if it is not finite, or more than so many median absolute deviations (each at least 1 % of the
    median) above the median of the window. (Shoal only.)"""

    max_skips: Count = 3
    """How often samples are skipped, or a step replayed once more, before a whole window of steps is accepted; the next time
    raises. (Shoal only.)"""


class ResilienceSettings(Section):
    """Going on after a fault."""

    vault: VaultSettings = VaultSettings()
    """Copies of the training state in memory. (Shoal only.)"""

    guard: GuardSettings = GuardSettings()
    """Steps that are outliers. (Shoal only.)"""

    def conflicts(self) -> Iterable[Conflict]:
        if self.guard.enabled and self.vault.every is None:
            yield Conflict(keys=("guard.enabled", "vault.every"),
                           message="got true, and there are no copies to go back to; set resilience.vault.every, such as "
                                   "to 10")
