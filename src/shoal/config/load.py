"""A configuration is a JSON object, wherever it stands: a file, a mapping, or URL-safe base64 text.

The JSON may hold comments (`//`, `/* */`, `#`) and trailing commas, for people write it by hand; it may not hold one
key twice, for one of the two would be lost. The caller's mapping is copied, never changed.
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


class _Repeated(dict[str, object]):
    """An object of the JSON text in which some key stands more than once."""

    keys_twice: tuple[str, ...] = ()


def read(source: Source) -> dict[str, object]:
    """Return the configuration that `source` holds, as plain dicts and lists of its own.

    `source` is a path, a mapping, or URL-safe base64 of JSON text. Raises ConfigError when the file is missing or
    cannot be read, when the text is no JSON (line and column are named), when it is no object, when a key stands
    twice in one object (with its path), or when a key of a mapping is no string.
    """
    if isinstance(source, Mapping):
        odd = (Problem(path=path, message="the key is no string; give a string") for path in _odd_keys(source, ""))
        raise_all(list(odd), None)
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
    """Return the name to put before a message about `source`: the path of a file, None for a mapping or base64."""
    if isinstance(source, Mapping):
        return None
    try:
        return str(source) if Path(source).is_file() else None
    except (OSError, ValueError):
        return None  # base64 is often longer than a path may be


def parse(text: str, name: str) -> dict[str, object]:
    """Return the object that JSON `text` holds; `name` says in an error where the text stands. See `read`."""
    plain = _TRAILING_COMMA.sub(_blank_unless_string, _COMMENT.sub(_blank_unless_string, text))
    try:
        found: object = json.loads(plain, object_pairs_hook=_pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}: line {error.lineno}, column {error.colno}: {error.msg}; give valid JSON") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: holds a JSON {type(found).__name__}; give an object: {{...}}")
    problems = [Problem(path=path, message="the key stands more than once; keep one") for path in _repeats(found, "")]
    raise_all(problems, name)
    return cast(dict[str, object], _copied(cast(object, found)))


def _blank_unless_string(match: re.Match[str]) -> str:
    # Blanks in place of what is cut keep the line and column of whatever json complains about.
    return match[0] if match[0].startswith('"') else _NOT_NEWLINE.sub(" ", match[0])


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    keys = [key for key, _ in pairs]
    # A repeated object may itself hold repeats that the last one hides; naming the outer key is enough.
    repeated = _Repeated(found)
    repeated.keys_twice = tuple(key for key in found if keys.count(key) > 1)
    return repeated


def _repeats(found: object, path: str) -> Iterator[str]:
    if isinstance(found, _Repeated):
        yield from (join(path, key) for key in found.keys_twice)
    for key, value in _children(found):
        yield from _repeats(value, join(path, key))


def _odd_keys(found: object, path: str) -> Iterator[str]:
    for key, value in _children(found):
        if isinstance(found, Mapping) and not isinstance(key, str):
            yield join(path, repr(key))
        yield from _odd_keys(value, join(path, key))


def _children(found: object) -> Iterator[tuple[str | int, object]]:
    if isinstance(found, Mapping):
        yield from cast(Mapping[str, object], found).items()
    elif isinstance(found, list):
        yield from enumerate(cast(list[object], found))


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
        return f"{path}: no such file (looked in {Path.cwd()}), and it is no base64 of a JSON object either"
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"{path}: cannot be read: {reason}"
