"""The `activation_checkpointing` section: what blocks recompute, and where saved tensors rest.

    {"recompute": "full", "rest": "cpu"}       recompute the blocks, and keep their inputs in host memory
    {"budget": "12GB"}                         recompute as little as these bytes allow
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from shoal.config.published import Published, inert
from shoal.config.section import Conflict, Positive, Section, Switch, Text, any_case, integral
from shoal.config.sizes import parse_bytes
from shoal.tier.settings import OffloadParam

__all__ = ["ActivationSettings", "FunctionSettings"]

_Recompute = Annotated[Literal["none", "selective", "full"], BeforeValidator(any_case("none", "selective", "full"))]


def _size(value: object) -> object:
    """Return the bytes that a text such as "12GB" or "512MiB" names, and any other value unchanged."""
    if isinstance(value, str):
        with suppress(ValueError):  # what is no size gets the error of the integer that it is not
            return parse_bytes(value)
    return integral(value)


_Rest = Annotated[Literal["device", "cpu", "nvme"], BeforeValidator(any_case("device", "cpu", "nvme"))]


class ActivationSettings(Section):
    """Memory of activations between forward and backward. Under the published name `checkpointing.configure` reads the
    section, and functions are recomputed where a script calls `checkpointing.checkpoint`."""

    recompute: _Recompute = "none"
    """The activations of repeated blocks that backward computes again: none; selective: all but products, convolutions and
    attention; full: all, from their inputs. (Shoal only.)"""

    rest: _Rest = "device"
    """Where the tensors that autograd saves rest until backward: on the compute device, in host memory or on a disk.
    `"cpu_checkpointing": true` is the published form of `cpu`. (Shoal only.)"""

    nvme_path: Text | None = None
    """The folder for `rest: nvme`; each run creates a subfolder in it and removes it at the end. (Shoal only.)"""

    budget: Annotated[Positive, BeforeValidator(_size)] | None = None
    """The bytes that saved tensors may take at once on each rank's compute device, as a number or as a text such as "12GB"
    or "512MiB". The first step measures the blocks, which then recompute as little as that allows; with `rest`, those of
    blocks for which there is no room rest. null: as `recompute` says. (Shoal only.)"""

    partition_activations: Switch = False
    """Keep one slice of the inputs of recomputed blocks on each tensor rank, which holds them whole otherwise."""

    cpu_checkpointing: Switch = False
    """The published form of `"rest": "cpu"`."""

    published: ClassVar[Mapping[str, Published]] = MappingProxyType({
        "contiguous_memory_optimization": inert("one buffer for the inputs of recomputed functions", False,
                                                reason="spans of the store are used again from step to step"),
        "number_checkpoints": inert("recomputed functions", None, reason="the blocks of the model are counted"),
        "synchronize_checkpoint_boundary": inert("wait for the device around a recomputed function", False,
                                                 reason="nothing here needs it"),
        "profile": inert("time recomputed functions", False,
                         reason="`with engine.trace() as trace` records the phases of a step"),
    })

    @property
    def offload(self) -> OffloadParam:
        """Where saved tensors rest, in the terms of a store."""
        if self.cpu_checkpointing or self.rest == "cpu":
            return OffloadParam(device="cpu")
        return OffloadParam(device="nvme", nvme_path=self.nvme_path) if self.rest == "nvme" else OffloadParam()

    def conflicts(self) -> Iterable[Conflict]:
        if self.rest == "nvme" and not self.nvme_path:
            yield Conflict(keys=("rest", "nvme_path"),
                           message="got 'nvme' without nvme_path; give the folder of a fast local disk")
        if self.budget is not None and self.recompute != "none":
            yield Conflict(keys=("budget", "recompute"),
                           message="got a budget beside recompute; the budget chooses what is recomputed: remove one")
        if self.cpu_checkpointing and self.rest == "nvme":
            yield Conflict(keys=("cpu_checkpointing", "rest"),
                           message='got true beside "rest": "nvme"; saved tensors rest in one place: remove one')


class FunctionSettings(ActivationSettings):
    """The same section as `checkpointing.configure` reads it: the published keys have an effect on recomputed functions."""

    contiguous_memory_optimization: Switch = False
    """Keep the inputs of one size in one buffer."""

    number_checkpoints: Positive | None = None
    """The functions whose inputs rest at once."""

    synchronize_checkpoint_boundary: Switch = False
    """Wait for the device before and after a function."""

    profile: Switch = False
    """Accepted with a warning: `with engine.trace() as trace` records the phases of a step."""

    published: ClassVar[Mapping[str, Published]] = MappingProxyType({})
