"""Read the lenient JSON of published configuration files (Hjson).

Beside JSON it allows comments (`#`, `//`, `/* */`), keys without quotes, strings without quotes up to the end of the line,
commas that are missing at the end of a line, and trailing commas. A key that occurs twice in one object is an error.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["loads"]

_BLANK = re.compile(r"(?:\s+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"')
_KEY = re.compile(r"[^\s,:{}\[\]\"']+")
_PLAIN = re.compile(r"[^\n,\]}#]+")
_COMMENT = re.compile(r"//|/\*")
_LINE = re.compile(r"[^\n]+")
_WORDS = {"true": True, "false": False, "null": None}


def loads(text: str) -> Any:
    """Return the value that `text` stands for; raises `ValueError` with line and column."""
    reader = _Reader(text)
    reader.skip_blank()
    value = reader.value() if reader.next() in ("{", "[") else reader.members("")
    reader.skip_blank()
    if reader.at < len(text):
        raise reader.error("text after the end of the object")
    return value


class _Reader:
    """A position in the text."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0

    def next(self) -> str:
        return self.text[self.at:self.at + 1]

    def skip_blank(self) -> None:
        found = _BLANK.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def take(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found[0]

    def error(self, what: str) -> ValueError:
        line = self.text.count("\n", 0, self.at) + 1
        column = self.at - self.text.rfind("\n", 0, self.at)
        return ValueError(f"line {line}, column {column}: {what}; give valid JSON or Hjson")

    def value(self) -> Any:
        match self.next():
            case "{":
                self.at += 1
                return self.members("}")
            case "[":
                self.at += 1
                return self.items()
            case '"':
                return self.string()
            case _:
                return self.plain()

    def string(self) -> str:
        quoted = self.take(_QUOTED)
        if quoted is None:
            raise self.error("a string without its closing quote")
        return json.loads(quoted)

    def plain(self) -> Any:
        start = self.at
        word = _COMMENT.split(self.take(_PLAIN) or "")[0]
        self.at = start + len(word)
        if word.strip() in _WORDS:
            return _WORDS[word.strip()]
        try:
            return json.loads(word)
        except ValueError:
            self.at = start
        line = (self.take(_LINE) or "").strip()
        if not line or line[0] in ",:]}":
            raise self.error("a value is missing")
        return line

    def members(self, end: str) -> dict[str, Any]:
        """Read the members of an object up to `end`, or up to the end of the text."""
        found: dict[str, Any] = {}
        twice: list[str] = []
        while True:
            self.skip_blank()
            if self.next() == end:
                self.at += 1
                break
            key = self.string() if self.next() == '"' else self.take(_KEY)
            if key is None:
                raise self.error("a key is missing")
            self.skip_blank()
            if self.next() != ":":
                raise self.error(f"no colon after the key '{key}'")
            self.at += 1
            self.skip_blank()
            if key in found:
                twice.append(key)
            found[key] = self.value()
            self.comma()
        if twice:
            raise ValueError(f"duplicate keys in the configuration: {twice}; keep one of each")
        return found

    def items(self) -> list[Any]:
        found: list[Any] = []
        while True:
            self.skip_blank()
            if self.next() == "]":
                self.at += 1
                return found
            if not self.next():
                raise self.error("a list without its closing bracket")
            found.append(self.value())
            self.comma()

    def comma(self) -> None:
        self.skip_blank()
        if self.next() == ",":
            self.at += 1
