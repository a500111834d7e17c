"""The settings of `save_checkpoint` and `load_checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from shoal.config.published import Published, inert, later, later_block
from shoal.config.section import Positive, Section, Switch, any_case

__all__ = ["CheckpointSettings"]

_TagValidation = Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(any_case("Ignore", "Warn", "Fail"))]


class CheckpointSettings(Section):
    """Options of `save_checkpoint` and `load_checkpoint`."""

    tag_validation: _TagValidation = "Warn"
    """The reaction to ranks that save under different tags."""

    keep_last: Positive | None = None
    """Number of newest checkpoints to keep in a folder; older ones are deleted; null keeps all. (Shoal only.)"""

    async_save: Switch = True
    """Write in the background: `save_checkpoint` returns once the state is copied. (Shoal only.)"""

    layout: Annotated[Literal["shoal", "deepspeed"], BeforeValidator(any_case("shoal", "deepspeed"))] = "shoal"
    """The files of a checkpoint: `deepspeed` adds those of DeepSpeed's layout, for scripts that read them and for runs that
    go back to DeepSpeed; about twice the bytes are then written. (Shoal only.)"""

    published: ClassVar[Mapping[str, Published]] = {
        "load_universal": inert(
            "load the universal form", False, True, reason="every checkpoint is in a form that loads anywhere"
        ),
        "use_node_local_storage": later("write to a folder that each node has for itself", False),
        "parallel_write": later_block("data ranks share the writing of layers", {"pipeline_stage": False}),
        "checkpoint_serialization": inert(
            "keep the framing of torch's pickles", True, False, reason="checkpoints hold no pickles"
        ),
        "writer": later_block("another writer of files"),
    }
