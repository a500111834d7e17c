"""How checkpoints are written and kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from shoal.config.kinds import Positive, Switch, any_case
from shoal.config.published import Published, inert, later, later_block
from shoal.config.section import Section

__all__ = ["CheckpointSettings"]

_TagValidation = Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(any_case("Ignore", "Warn", "Fail"))]


class CheckpointSettings(Section):
    """How `save_checkpoint` and `load_checkpoint` work."""

    tag_validation: _TagValidation = "Warn"
    """What happens when ranks save under different tags."""

    keep_last: Positive | None = None
    """How many checkpoints to keep in a folder, the oldest going first; null keeps all. (Ours.)"""

    async_save: Switch = True
    """Write while training goes on: `save_checkpoint` returns once the state is copied. (Ours.)"""

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
