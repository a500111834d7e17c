"""A section is a frozen model of one JSON object: its fields are its keys, with their meaning in the line below.

A field's type and default are stated once, here and nowhere else; the reference page is made of them and of the string
under each field. Beside its fields a section lists the other spellings that it takes (`aliases`) and the published keys
that are no settings of ours (`published`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from shoal.config.published import Published

__all__ = ["Conflict", "Rewritten", "Section"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Keys of one section that are each allowed but not together; paths are relative to the section."""

    keys: tuple[str, ...]  # the first is the one that the message is about
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A section's JSON in today's spelling, and where the values that it replaced came from, by key."""

    values: dict[str, object]
    origins: Mapping[str, str]
    conflicts: tuple[Conflict, ...] = ()


class Section(BaseModel):
    """One JSON object of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    published: ClassVar[Mapping[str, Published]] = MappingProxyType({})

    @classmethod
    def rewrite(cls, given: dict[str, object]) -> Rewritten:
        """Return `given` with old forms that are more than another name of a key put into today's form."""
        return Rewritten(values=given, origins={})

    def conflicts(self) -> Iterable[Conflict]:
        """Yield the combinations of this section's values that cannot be honoured together."""
        return ()
