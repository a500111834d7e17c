"""A configuration is one JSON object, given as a file, a mapping, or URL-safe base64 text.

The JSON may contain comments (`//`, `/* */`, `#`) and trailing commas. A duplicate key is an error, because JSON parsers
would silently drop one of the values. The caller's mapping is copied, never modified.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from shoal.config.problem import Problem, join, raise_all
from shoal.errors import ConfigError

__all__ = ["Source", "name_of", "parse", "read"]

Source = str | os.PathLike[str] | Mapping[str, object]

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[\]}}])", re.DOTALL)
_NOT_NEWLINE = re.compile(r"[^\n]")


class _WithDuplicates(dict[str, object]):
    """A JSON object with duplicate keys."""

    duplicate_keys: tuple[str, ...] = ()


def read(source: Source) -> dict[str, object]:
    """Read the configuration in `source` and return it as new plain dicts and lists.

    `source` is a path, a mapping, or URL-safe base64 of JSON text. Raises ConfigError when the file is missing or
    unreadable, the text is not valid JSON (with line and column) or not an object, one object has a duplicate key (with
    its path), or a key of a mapping is not a string.
    """
    if isinstance(source, Mapping):
        raise_all([Problem(path=path, message="the key is not a string; give a string")
                   for path in _non_string_keys(source, "")], None)
        return cast(dict[str, object], _copied(source))
    try:
        path = Path(source)
    except TypeError:
        kind = type(source).__name__
        raise ConfigError(f"config: got a {kind}; give a path, a dict or URL-safe base64 of JSON") from None
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; give a JSON file") from None
    except (OSError, ValueError) as error:
        decoded = _from_base64(source) if isinstance(source, str) else None
        if decoded is None:
            raise ConfigError(_unreadable(path, error)) from None
        return parse(decoded, "the base64 text")
    return parse(text, str(path))


def name_of(source: Source) -> str | None:
    """Return the prefix for messages about `source`: the path of a file, None for a mapping or base64."""
    if isinstance(source, Mapping):
        return None
    try:
        return str(source) if Path(source).is_file() else None
    except (OSError, ValueError):
        return None  # base64 text is often longer than the longest allowed path


def parse(text: str, name: str) -> dict[str, object]:
    """Parse the JSON object in `text`; `name` identifies the text in error messages. Raises ConfigError as `read` does."""
    plain = _TRAILING_COMMA.sub(_blank_unless_string, _COMMENT.sub(_blank_unless_string, text))
    try:
        parsed: object = json.loads(plain, object_pairs_hook=_from_pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}: line {error.lineno}, column {error.colno}: {error.msg}; give valid JSON") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name}: contains a JSON {type(parsed).__name__}; give an object: {{...}}")
    problems = [Problem(path=path, message="duplicate key; keep one") for path in _duplicates(parsed, "")]
    raise_all(problems, name)
    return cast(dict[str, object], _copied(cast(object, parsed)))


def _blank_unless_string(match: re.Match[str]) -> str:
    # Blanks instead of removal keep line and column numbers right in JSON error messages.
    return match[0] if match[0].startswith('"') else _NOT_NEWLINE.sub(" ", match[0])


def _from_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    keys = [key for key, _ in pairs]
    # An overwritten object may itself contain duplicates, which are lost here; naming the outer key is enough.
    marked = _WithDuplicates(values)
    marked.duplicate_keys = tuple(key for key in values if keys.count(key) > 1)
    return marked


def _duplicates(value: object, path: str) -> Iterator[str]:
    if isinstance(value, _WithDuplicates):
        yield from (join(path, key) for key in value.duplicate_keys)
    for key, inner in _children(value):
        yield from _duplicates(inner, join(path, key))


def _non_string_keys(value: object, path: str) -> Iterator[str]:
    for key, inner in _children(value):
        if isinstance(value, Mapping) and not isinstance(key, str):
            yield join(path, repr(key))
        yield from _non_string_keys(inner, join(path, key))


def _children(value: object) -> Iterator[tuple[str | int, object]]:
    if isinstance(value, Mapping):
        yield from cast(Mapping[str, object], value).items()
    elif isinstance(value, list):
        yield from enumerate(cast(list[object], value))


def _copied(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in cast(Mapping[object, object], value).items()}
    if isinstance(value, list | tuple):
        return [_copied(inner) for inner in cast(list[object], value)]
    return value


def _from_base64(source: str) -> str | None:
    try:
        text = base64.urlsafe_b64decode(source).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None


def _unreadable(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path}: no such file (looked in {Path.cwd()}), and the text is not base64 of a JSON object either"
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"{path}: cannot be read: {reason}"
