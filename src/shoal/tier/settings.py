"""The settings of offload: the tier of weights and of optimizer state, and disk I/O."""

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
    """Offload of the weights between their uses; at stages 0 to 2 every rank offloads full weights. The old form of device
    `cpu` is `"cpu_offload_param": true` in `zero_optimization`."""

    device: Device = "none"
    """none: the compute device; cpu: host memory; nvme: a disk."""

    nvme_path: Text | None = None
    """The folder for `nvme`; each run creates a subfolder in it and removes it at the end."""

    buffer_count: Positive = 5
    """Units whose weights are in memory at once: the unit in use and the prefetched units."""

    buffer_size: Positive = 100_000_000
    """Elements of one buffer; a larger unit counts as several buffers."""

    max_in_cpu: Count = 0
    """With `nvme`: weight elements that stay in host memory, from the first units. DeepSpeed's default is 1e9; here memory
    follows the formula."""

    pin_memory: Switch = True
    """Use page-locked host memory, from which a GPU copies faster. No effect without a GPU."""

    def conflicts(self) -> Iterable[Conflict]:
        if self.device == "nvme" and not self.nvme_path:
            yield Conflict(keys=("device", "nvme_path"), message=_NEEDS_PATH)


class OffloadOptimizer(Section):
    """Offload of masters, moments and reduced gradients, at every stage; the optimizer steps on the host. The old form of
    device `cpu` is `"cpu_offload": true` in `zero_optimization`."""

    device: Device = "none"
    """none: the compute device; cpu: host memory; nvme: a disk."""

    nvme_path: Text | None = None
    """The folder for `nvme`; each run creates a subfolder in it and removes it at the end."""

    buffer_count: Positive = 4
    """Pieces of the state (of at most 2^20 elements, or `sub_group_size`) in memory at once: one is stepped while the
    others are read or written."""

    pin_memory: Switch = True
    """Use page-locked host memory, from which a GPU copies faster. No effect without a GPU."""

    pipeline_read: Switch = True
    """Read the next pieces while one is stepped. Results are bit-identical; DeepSpeed's default is off."""

    pipeline_write: Switch = True
    """Write the previous pieces while one is stepped, likewise."""

    ratio: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """The fraction of the elements to offload; the state of the other units stays on the compute device."""

    step_in_backward: Switch | None = None
    """true: step each unit as soon as backward has reduced its gradient; state on disk then moves fewer bytes, more evenly.
    Weights change before `engine.step()`, and each step has one backward, `engine.backward(loss)`. Not allowed with
    `gradient_clipping`, fp16, bf16 overflow checks and `ignore_unused_parameters` false, which depend on all gradients.
    false or null: `engine.step()` takes the whole step. (Shoal only.)"""

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
    """Disk I/O of offloaded state; `shoal disk bench` finds the best values for a disk."""

    block_size: Positive = 1 << 20
    """Bytes of one request."""

    queue_depth: Positive = 8
    """Concurrent read requests, and as many write requests, per `intra_op_parallelism`."""

    intra_op_parallelism: Positive = 1
    """Multiplies `queue_depth`; at most 64 requests, reads and writes together, are in flight."""

    aliases: ClassVar[Mapping[str, str]] = {"thread_count": "intra_op_parallelism"}
    published: ClassVar[Mapping[str, Published]] = {
        "single_submit": inert("submit requests one by one", False, True, reason="each request has its own thread"),
        "overlap_events": inert("submit while others complete", True, False, reason="they always overlap"),
        "use_gds": later("copy between disk and GPU directly", False),
    }
