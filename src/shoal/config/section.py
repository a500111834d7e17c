"""A configuration section is a frozen pydantic model of one JSON object.

Each field is one JSON key. Its type and default are stated here and nowhere else. The string literal under a field
documents the key; `config/reference.py` builds docs/configuration.md from these strings. A section also lists other
accepted spellings of its keys (`aliases`) and the published DeepSpeed keys that it does not implement (`published`).

The value types below are stricter than Python: `true` is not a number, `"3"` is not a number, and `5e8` is an integer.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, Strict

from shoal.config.published import Published
from shoal.errors import ConfigError

__all__ = ["Conflict", "Count", "Dtype", "Every", "Number", "Positive", "Rewritten", "Section", "Switch", "Text", "any_case",
           "integral", "spelled"]


def integral(value: object) -> object:
    """Return an integral float or a foreign integer (numpy's) as an int, and any other value unchanged."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case bool():
            return value
        case numbers.Integral():
            return int(value)
        case _:
            return value


def spelled(spellings: dict[str, str]) -> Callable[[object], object]:
    """Return a function that maps a spelling, in any case, to its canonical name. Keys of `spellings` are lower case."""

    def canonical(value: object) -> object:
        return spellings.get(value.lower(), value) if isinstance(value, str) else value

    return canonical


def any_case(*names: str) -> Callable[[object], object]:
    """Return a function that maps a name in any case to its canonical case."""
    return spelled({name.lower(): name for name in names})


def _infinity_to_none(value: object) -> object:
    return None if value == math.inf else integral(value)


Switch = Annotated[bool, Strict()]
"""true or false."""

Text = Annotated[str, Strict()]
"""A string."""

Number = Annotated[float, Strict(), AllowInfNan(False)]
"""A finite number."""

Count = Annotated[int, Strict(), Field(ge=0), BeforeValidator(integral)]
"""A whole number from 0."""

Positive = Annotated[int, Strict(), Field(gt=0), BeforeValidator(integral)]
"""A whole number from 1."""

Every = Annotated[Positive | None, BeforeValidator(_infinity_to_none)]
"""An interval in steps; null or infinity means never."""

DTYPE_SPELLINGS = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
    "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip
"""The name of a dtype, by each of its spellings."""

Dtype = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(spelled(DTYPE_SPELLINGS))]
"""A floating-point type: fp16 (float16, half), bf16 (bfloat16) or fp32 (float32, float), in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Keys of one section whose values are each allowed but not together; key paths are relative to the section."""

    keys: tuple[str, ...]  # the message is reported at the first key
    message: str
    kind: type[ConfigError] = ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A section's JSON in the current form, with the origin of every value that was rewritten, by key."""

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
        """Translate legacy forms in `given` that are more than an alias of one key into the current form."""
        return Rewritten(values=given, origins={})

    def conflicts(self) -> Iterable[Conflict]:
        """Yield the combinations of this section's values that are not allowed together."""
        return ()
