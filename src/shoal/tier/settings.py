"""Which tier the weights and the optimizer's state rest in, and how the disk is read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from shoal.config.published import Published, inert, later
from shoal.config.section import Conflict, Count, Number, Positive, Section, Switch, Text, any_case

__all__ = ["AioSettings", "OffloadOptimizer", "OffloadParam"]


def _device(value: object) -> object:
    return "none" if value is None else any_case("none", "cpu", "nvme")(value)


Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(_device)]

_NEEDS_PATH = "got 'nvme' without nvme_path; give the folder of a fast local disk"


class OffloadParam(Section):
    """Where weights rest between their uses; at stages 0 to 2 each rank's whole weights do. The old form of device `cpu` is
    `"cpu_offload_param": true` beside the block's place."""

    device: Device = "none"
    """none: the compute device; cpu: the host's memory; nvme: a disk."""

    nvme_path: Text | None = None
    """The folder for `nvme`; each run makes one of its own in it, and removes it."""

    buffer_count: Positive = 5
    """Units whose weights are in memory at once: the one in use, and those that are read ahead."""

    buffer_size: Positive = 100_000_000
    """Elements of one such unit; larger ones are read ahead as if they were several."""

    max_in_cpu: Count = 0
    """With `nvme`: elements of weights that stay in the host's memory, those of the first units. DeepSpeed's default is
    1e9; here memory follows the formula."""

    pin_memory: Switch = True
    """Page-locked host memory, from which a GPU copies faster. Without a GPU it has no meaning."""

    def conflicts(self) -> Iterable[Conflict]:
        if self.device == "nvme" and not self.nvme_path:
            yield Conflict(keys=("device", "nvme_path"), message=_NEEDS_PATH)


class OffloadOptimizer(Section):
    """Where masters, moments and reduced gradients rest between their uses, at every stage; the step is taken on the host.
    The old form of device `cpu` is `"cpu_offload": true` beside the block's place."""

    device: Device = "none"
    """none: the compute device; cpu: the host's memory; nvme: a disk."""

    nvme_path: Text | None = None
    """The folder for `nvme`; each run makes one of its own in it, and removes it."""

    buffer_count: Positive = 4
    """Pieces of the state (of at most 2^20 elements, or `sub_group_size`) in memory at once: one is stepped, the others
    are read or written meanwhile."""

    pin_memory: Switch = True
    """Page-locked host memory, from which a GPU copies faster. Without a GPU it has no meaning."""

    pipeline_read: Switch = True
    """Read the next pieces while one is stepped. Bit-identical either way, so it is on; DeepSpeed's default is off."""

    pipeline_write: Switch = True
    """Write the last pieces while one is stepped, likewise."""

    ratio: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """The share of the elements that rest there; the state of the other units stays on the compute device."""

    step_in_backward: Switch | None = None
    """true: step each unit as soon as backward has reduced its gradient; from a disk fewer bytes move then, and more evenly.
    Weights change before `engine.step()`, and the one backward of a step is `engine.backward(loss)`. Refused beside
    `gradient_clipping`, fp16, bf16 overflow checks and `ignore_unused_parameters` false, which decide on all gradients
    together. false or null: `engine.step()` takes the whole step. (Ours.)"""

    published: ClassVar[Mapping[str, Published]] = {
        "fast_init": inert("start the files faster", False, True, reason="new state is zeros, which are never written"),
        "pipeline": inert("either of the two above", False, True, reason="set pipeline_read and pipeline_write"),
        "super_offload": later("steps ahead of the norm, of state in memory", False),
        "cpuadam_cores_perc": inert("cores for super_offload", 0.8, reason="super_offload is not supported yet"),
    }

    def conflicts(self) -> Iterable[Conflict]:
        if self.device == "nvme" and not self.nvme_path:
            yield Conflict(keys=("device", "nvme_path"), message=_NEEDS_PATH)


class AioSettings(Section):
    """How files of state are read and written; `shoal disk bench` finds the best values of a disk."""

    block_size: Positive = 1 << 20
    """Bytes of one request."""

    queue_depth: Positive = 8
    """Requests under way at once, reading and writing each, times the following."""

    intra_op_parallelism: Positive = 1
    """How many times `queue_depth` requests are under way; 64 in all, both ways together, at most."""

    aliases: ClassVar[Mapping[str, str]] = {"thread_count": "intra_op_parallelism"}
    published: ClassVar[Mapping[str, Published]] = {
        "single_submit": inert("submit requests one by one", False, True, reason="each request has its own thread"),
        "overlap_events": inert("submit while others complete", True, False, reason="they always overlap"),
        "use_gds": later("copy between disk and GPU directly", False),
    }
