"""Which collectives are recorded."""

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
    """The record of collectives: count, bytes, time and bandwidth of each, and which ranks come late. The block alone
    switches it on."""

    enabled: Switch = False
    """Record. A block without this key is switched on."""

    prof_all: Switch = True
    """Record every collective; false: only those of `prof_ops`."""

    prof_ops: tuple[_Operation, ...] = ()
    """The operations that are recorded where `prof_all` is false, such as `"all_gather"`; torch's longer names too."""

    verbose: Switch = False
    """Log every recorded collective on rank 0 as it ends."""

    debug: Switch = False
    """Tell calls of one collective apart by the function that asked for them."""

    @classmethod
    def rewrite(cls, given: dict[str, object]) -> Rewritten:
        if not is_auto(given.get("enabled", "auto")):
            return Rewritten(values=given, origins={})
        return Rewritten(values=given | {"enabled": True}, origins={"enabled": "given as 'comms_logger'"})
