"""How a pipeline runs: the order of its instructions, and what scripts for DeepSpeed say beside it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from shoal.config.published import Published, inert
from shoal.config.section import Count, Positive, Section, Text

__all__ = ["PipelineSettings"]


class PipelineSettings(Section):
    """What concerns a `PipelineModule`; without one nothing here has an effect."""

    stages: Positive | None = None
    """Pipeline ranks, which the module must have too; null: as many as it has."""

    schedule: Text | None = None
    """The order of instructions: gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zbv; null: the module's own. The stages of a
    rank must be the same as the module's. (Ours.)"""

    in_flight: Positive | None = None
    """Microbatches whose activations a rank may hold at once; null: as many as the schedule holds. More let messages travel
    without a wait, and W of zero-bubble schedules be one product of many microbatches; fewer take less memory, and wait.
    Not for gpipe and interleaved. (Ours.)"""

    activation_checkpoint_interval: Count = 0
    """Layers that are recomputed together in backward; 0: as the module says."""

    published: ClassVar[Mapping[str, Published]] = MappingProxyType({
        "partition": inert("how layers are spread over stages", "best",
                           reason="PipelineModule spreads its layers when it is built; pass partition_method to it"),
        "seed_layers": inert("seed every layer by its number", False,
                             reason="PipelineModule seeds its layers when it is built; pass seed_layers to it"),
        "use_reentrant": inert("which way torch recomputes", True, False,
                               reason="the non-reentrant way gives the same gradients"),
        "pipe_partitioned": inert("cut what stages send over the tensor ranks", True,
                                  reason="every tensor rank sends to its own neighbour"),
        "grad_partitioned": inert("cut the gradients that stages send over the tensor ranks", True,
                                  reason="every tensor rank sends to its own neighbour"),
    })
