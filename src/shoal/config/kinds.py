"""The kinds of value that a key may hold, stricter than Python: `true` is no number, "3" is no number, 5e8 is whole."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AllowInfNan, BeforeValidator, Field, Strict

__all__ = ["Count", "Dtype", "Every", "Number", "Positive", "Switch", "Text", "any_case", "spelled", "whole"]


def whole(value: object) -> object:
    """Return a whole float or a foreign integer (numpy's) as an int, anything else as it is."""
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
    """Return a function that maps a spelling, in any case, to the one name that stands for it."""

    def canonical(value: object) -> object:
        return spellings.get(value.lower(), value) if isinstance(value, str) else value

    return canonical


def any_case(*names: str) -> Callable[[object], object]:
    """Return a function that maps any case of a name to the name."""
    return spelled({name.lower(): name for name in names})


def _endless_is_never(value: object) -> object:
    return None if value == math.inf else whole(value)


Switch = Annotated[bool, Strict()]
"""true or false."""

Text = Annotated[str, Strict()]
"""A string."""

Number = Annotated[float, Strict(), AllowInfNan(False)]
"""A finite number."""

Count = Annotated[int, Strict(), Field(ge=0), BeforeValidator(whole)]
"""A whole number from 0."""

Positive = Annotated[int, Strict(), Field(gt=0), BeforeValidator(whole)]
"""A whole number from 1."""

Every = Annotated[Positive | None, BeforeValidator(_endless_is_never)]
"""Every so many; null or infinity: never."""

Dtype = Annotated[
    Literal["fp16", "bf16", "fp32"],
    BeforeValidator(
        spelled(
            {"fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
            | {"fp32": "fp32", "float32": "fp32", "float": "fp32"}
        )
    ),
]
"""A floating-point type: fp16 (float16, half), bf16 (bfloat16) or fp32 (float32, float), in any case."""
