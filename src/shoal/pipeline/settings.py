"""The settings of pipeline parallelism: the schedule, the microbatches in flight, recompute."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from shoal.config.published import Published, inert
from shoal.config.section import Count, Positive, Section, Text

__all__ = ["PipelineSettings"]


class PipelineSettings(Section):
    """Settings of a `PipelineModule`; without one they have no effect."""

    stages: Positive | None = None
    """Pipeline ranks; must equal the number of the module; null: the number of the module."""

    schedule: Text | None = None
    """The pipeline schedule: gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zbv; null: the schedule of the module. It must assign
    the same stages to each rank as the module's schedule. (Shoal only.)"""

    in_flight: Positive | None = None
    """Maximum microbatches whose activations a rank holds at once; null: the number of the schedule. A larger number lets
    messages overlap with compute and batches the weight gradients (W) of zero-bubble schedules; a smaller number needs
    less memory and waits more. Not for gpipe and interleaved. (Shoal only.)"""

    activation_checkpoint_interval: Count = 0
    """Layers per activation checkpoint; 0: the setting of the module."""

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
