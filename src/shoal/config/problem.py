"""One error reports every problem of a configuration, one line each: key path, value, allowed values, fix.

zero_optimization.stage: got 4; choose 0, 1, 2 or 3
zero_optimization.stag: unknown key; did you mean 'stage'?
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shoal.errors import ConfigError

__all__ = ["Problem", "from_pydantic", "join", "nearest", "one_of", "raise_all", "shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of one key."""

    path: str
    message: str
    kind: type[ConfigError] = ConfigError
    """The error that reports it where no problem has another one."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def join(path: str, key: object) -> str:
    """Return the path of `key` inside `path`: `a` and `b` give `a.b`, `a` and 3 give `a[3]`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else str(key)


def shown(value: object, width: int = 60) -> str:
    """Return `value` as JSON text, truncated to `width` characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed word most similar to `word`, or None when none is similar. Case is ignored.

    Similarity is the ratio of `difflib.SequenceMatcher` and must reach 0.6. When no word reaches it, the shortest
    allowed word that contains `word` is returned, provided that `word` has at least four letters.
    """
    words = {candidate.lower(): candidate for candidate in sorted(allowed)}
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    if close:
        return words[close[0]]
    containing = [candidate for lowered, candidate in words.items() if len(word) >= 4 and word.lower() in lowered]
    return min(containing, key=len, default=None)


def one_of(values: Sequence[object]) -> str:
    """Return `0, 1, 2 or 3` for the values 0 to 3."""
    texts = [shown(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


# The fix to suggest for each pydantic error type; braces are filled from the error's context.
_ALLOWED = {
    "literal_error": "choose {expected}",
    "int_type": "give a whole number",
    "float_type": "give a number",
    "finite_number": "give a finite number",
    "bool_type": "choose true or false",
    "string_type": "give a string",
    "greater_than": "give a number greater than {gt:g}",
    "greater_than_equal": "give a number of at least {ge:g}",
    "less_than_equal": "give a number of at most {le:g}",
    "less_than": "give a number less than {lt:g}",
    "int_from_float": "give a whole number",
    "list_type": "give a list, such as [2, 4]",
    "tuple_type": "give a list, such as [2, 4]",
    "too_short": "give a list with at least {min_length} of them",
    "too_long": "give a list with at most {max_length} of them",
    "mapping_type": "give a JSON object",
    "dict_type": "give a JSON object",
}


def _from_details(details: ErrorDetails) -> Problem:
    path = ""
    for key in details["loc"]:
        path = join(path, key)
    context = cast(Mapping[str, object], details.get("ctx") or {})
    allowed = _ALLOWED.get(details["type"], details["msg"]).format(**context)
    return Problem(path=path, message=f"got {shown(details['input'])}; {allowed}")


def from_pydantic(error: ValidationError) -> dict[tuple[int | str, ...], Problem]:
    """Return one problem per value that pydantic rejected, keyed by the location of the value."""
    return {details["loc"]: _from_details(details) for details in error.errors(include_url=False)}


def raise_all(problems: Sequence[Problem], source: str | None) -> None:
    """Raise one error that lists every problem; return if there is none.

    `source` is the file that the configuration came from, or None. Raises the error of a subclass of ConfigError when every
    problem has this one, such as NotSupportedYet of published keys that are not supported yet; and ConfigError otherwise.
    """
    if not problems:
        return
    kinds = {problem.kind for problem in problems}
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    prefix = f"{source}: " if source else ""
    if len(problems) == 1:
        raise kind(f"{prefix}{problems[0]}")
    lines = "".join(f"\n  {problem}" for problem in sorted(problems, key=lambda problem: problem.path))
    raise kind(f"{prefix}{len(problems)} problems in the configuration{lines}")
