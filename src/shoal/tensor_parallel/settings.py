"""The settings of automatic tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

from shoal.config.published import Published, later
from shoal.config.section import Conflict, Count, Positive, Section

__all__ = ["TensorParallelSettings"]


class TpSettings(Section):
    """The older form of `autotp_size`."""

    tp_size: Positive = 1
    """The same as `autotp_size`."""

    published: ClassVar[Mapping[str, Published]] = MappingProxyType({
        "tp_grain_size": later("sizes that cuts are multiples of", 1),
        "mpu": later("an object with groups", None),
        "tp_group": later("a process group", None),
    })


class TensorParallelSettings(Section):
    """Slice the layers of a model over the tensor ranks by the plan of its class."""

    autotp_size: Count = 0
    """Size of the tensor axis of the mesh; 0: no tensor parallelism. A model that is not sliced yet is sliced by the
    built-in plan of its class."""

    tp: TpSettings = TpSettings()
    """The older form of `autotp_size`."""

    published: ClassVar[Mapping[str, Published]] = MappingProxyType({
        "dtype": later("the dtype of the sliced layers", None),
        "tp_overlap_comm": later("overlap the collectives of layers", False),
        "partition_config": later("a plan in JSON", None),
        "preset_model": later("a plan by name", None),
        "injection_policy_tuple": later("a plan of an older form", None),
        "keep_module_on_host": later("keep the model on the host", False),
        "kernel_inject": later("kernels for inference", False),
    })

    def conflicts(self) -> Iterable[Conflict]:
        if self.autotp_size and self.tp.tp_size not in (1, self.autotp_size):
            yield Conflict(keys=("autotp_size", "tp.tp_size"),
                           message=f"got {self.autotp_size} beside tp.tp_size {self.tp.tp_size}; give one of them")

    @property
    def size(self) -> int | None:
        """The size of the tensor axis, or None if no key sets it."""
        return max(self.autotp_size, self.tp.tp_size) if self.autotp_size or self.tp.tp_size > 1 else None
