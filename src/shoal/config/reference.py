"""The reference page is the sections, printed: nothing in it is written twice.

Types and defaults come from the fields, meanings from the string under each field, and the fate of every other published
key from the section's table.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from typing import cast

from shoal.config.problem import shown
from shoal.config.published import Fate, Published
from shoal.config.resolve import nested
from shoal.config.section import Section

__all__ = ["docstrings", "render"]

_OPENING = """\
# Configuration

One JSON object, given to `shoal.initialize(config=...)` as a path, a dict, or URL-safe base64 text. Files may hold
comments (`//`, `/* */`, `#`) and trailing commas. `shoal config show FILE --ranks N` prints what a file resolves to and
where each value comes from. This page is made by `shoal config reference`.

- A key that does not exist is refused, with the nearest one that does, and so is a key that stands twice or under two
  spellings. (DeepSpeed passes over unknown keys at the top level, so that a mistyped one does nothing.) One message
  names everything that is wrong with a file.
- Whole numbers may be written like `5e8`.
- `"auto"` means that the key is not given.
- **honoured**: the key does what it says. **not yet**: a later version will honour it; until then any value other than
  the default raises `NotSupportedYet`, and so does a block unless it is switched off. **no effect**: it cannot change
  anything here; a value that asks for a change is warned of, once. **old form**: what to write in its place.
- `train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks`; any two of the three
  give the third, and where only one is given, accumulation is 1.
"""

_HEAD = "| Key | Type | Default | Meaning | Status |\n|---|---|---|---|---|"


def render(kind: type[Section]) -> str:
    """Return the Markdown page of the configuration whose top level is `kind`."""
    parts = [_OPENING, _table("Top level", kind, blocks=False), *_tables(kind), _blocks(kind)]
    return "\n".join(parts)


def _tables(kind: type[Section], path: str = "") -> Iterator[str]:
    """Yield the tables of the sections within `kind`, each followed by those within it."""
    for name, section in nested(kind).items():
        yield _table(f"`{path}{name}`", section)
        yield from _tables(section, f"{path}{name}.")


def _table(title: str, kind: type[Section], *, blocks: bool = True) -> str:
    schemas = cast(dict[str, dict[str, object]], kind.model_json_schema()["properties"])
    meanings = docstrings(kind)
    rows: list[str] = []
    for name, info in kind.model_fields.items():
        if name in nested(kind):
            continue
        default = "{}" if info.default_factory is not None else shown(info.default)
        rows.append(_row(name, _type(schemas[name]), default, meanings[name] + _aliases(kind, name), "honoured"))
    rows += [_published_row(key, published) for key, published in kind.published.items() if not _is_block(published)]
    if blocks:
        rows += [row for key, published in kind.published.items() for row in _block_rows(key, published)]
    summary = inspect.getdoc(kind) or ""
    return f"## {title}\n\n{summary}\n\n{_HEAD}\n" + "\n".join(rows) + "\n"


def _blocks(kind: type[Section]) -> str:
    rows = [row for key, published in kind.published.items() for row in _block_rows(key, published)]
    return f"## Blocks of later versions\n\n{_HEAD}\n" + "\n".join(rows) + "\n"


def docstrings(kind: type[Section]) -> dict[str, str]:
    """Return the string under each field of `kind`, on one line, by field. Raises KeyError for a field without one."""
    body = cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
    found: dict[str, str] = {}
    for statement, below in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[statement.target.id] = " ".join(text.split())
                case _:
                    pass
    return {name: found[name] for name in kind.model_fields}


def _row(key: str, kind: str, default: str, meaning: str, status: str) -> str:
    default_cell = f"`{default}`" if default else ""
    cells = (f"`{key}`", kind, default_cell, meaning, status)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _aliases(kind: type[Section], name: str) -> str:
    others = [f"`{other}`" for other, field in kind.aliases.items() if field == name]
    return f" Also spelled {' or '.join(others)}." if others else ""


def _is_block(published: Published) -> bool:
    return published.open or bool(published.keys)


def _published_row(key: str, published: Published) -> str:
    default = shown(published.accepts[0]) if published.accepts else ""
    kind = _type({"type": _json_type(published.accepts[0])}) if published.accepts else ""
    return _row(key, kind, default, _sentence(published.meaning), _status(published))


def _block_rows(key: str, published: Published) -> Iterator[str]:
    if not _is_block(published):
        return
    off = f"not yet, unless `{published.switch}` is `{shown(published.switched_off)}`"
    switch = off if published.switch else "not yet"
    yield _row(key, "object", "", _sentence(published.meaning), switch)
    for name, default in published.keys.items():
        if not isinstance(default, Published):
            yield _row(f"{key}.{name}", _type({"type": _json_type(default)}), shown(default), "", "not yet")
        elif _is_block(default):
            yield from _block_rows(f"{key}.{name}", default)
        else:
            yield _published_row(f"{key}.{name}", default)


def _status(published: Published) -> str:
    match published.fate:
        case Fate.LATER:
            return Fate.LATER.value
        case Fate.INERT | Fate.OLD:
            return f"{published.fate.value}: {published.reason}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _json_type(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return ""


def _type(schema: Mapping[str, object]) -> str:
    """Return in words the values that a JSON schema allows."""
    choices = cast(list[Mapping[str, object]], schema.get("anyOf") or [])
    if choices:
        return " or ".join(_type(choice) for choice in choices)
    if "enum" in schema:
        return ", ".join(f"`{shown(value)}`" for value in cast(list[object], schema["enum"]))
    words = {
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "string": "string",
        "object": "object",
        "array": "list",
    }
    name = cast(str, schema.get("type", ""))
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<="}
    limits = [f"{sign} {schema[bound]:g}" for bound, sign in bounds.items() if bound in schema]
    return " ".join([words.get(name, name), *limits])
