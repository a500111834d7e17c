"""The settings of the log of collectives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from shoal.config.published import is_auto
from shoal.config.section import Rewritten, Section, Switch
from shoal.recording.call import operation

__all__ = ["CommsLoggerSettings"]


_Operation = Annotated[
    Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "gather", "send", "barrier"],
    BeforeValidator(lambda name: operation(name) if isinstance(name, str) else name),
]


class CommsLoggerSettings(Section):
    """The log of collectives: count, bytes, time and bandwidth of each, and straggler ranks. An empty block enables it."""

    enabled: Switch = False
    """Record collectives. A block without this key is enabled."""

    prof_all: Switch = True
    """Record every collective; false: only the operations in `prof_ops`."""

    prof_ops: tuple[_Operation, ...] = ()
    """Operations to record if `prof_all` is false, such as `"all_gather"`; torch's longer names are accepted."""

    verbose: Switch = False
    """Log every recorded collective on rank 0 when it ends."""

    debug: Switch = False
    """Distinguish calls of the same collective by the calling function."""

    @classmethod
    def rewrite(cls, given: dict[str, object]) -> Rewritten:
        if not is_auto(given.get("enabled", "auto")):
            return Rewritten(values=given, origins={})
        return Rewritten(values=given | {"enabled": True}, origins={"enabled": "given as 'comms_logger'"})
