"""A configuration is read from any source; comments and trailing commas are allowed, duplicate keys are errors."""

import base64
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.load import name_of, parse, read
from shoal.errors import ConfigError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=12
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)
GAPS = st.sampled_from(["", " ", "\n", "// note, } \n", '# "quoted" note\n', "/* several\n lines, ] */", "\t/**/"])


def with_comments(value: object, draw: st.DataObject) -> str:
    """Write `value` as JSON with random comments around every token and random trailing commas."""

    def gap() -> str:
        return draw.draw(GAPS)

    def items(texts: list[str]) -> str:
        comma = "," if texts and draw.draw(st.booleans()) else ""
        return ",".join(texts) + gap() + comma + gap()

    match value:
        case dict():
            pairs = [f"{gap()}{json.dumps(key)}{gap()}:{with_comments(inner, draw)}" for key, inner in value.items()]
            return f"{gap()}{{{items(pairs)}}}{gap()}"
        case list():
            return f"{gap()}[{items([with_comments(inner, draw) for inner in value])}]{gap()}"
        case _:
            return f"{gap()}{json.dumps(value)}{gap()}"


@given(OBJECTS, st.data())
def test_comments_and_trailing_commas_change_nothing(value: dict[str, object], data: st.DataObject) -> None:
    assert parse(with_comments(value, data), "text") == value


@given(OBJECTS)
def test_a_mapping_is_copied_deeply(value: dict[str, object]) -> None:
    before = json.dumps(value)
    copy = read({"top": value})
    assert copy == {"top": value}
    empty_all(copy)
    assert json.dumps(value) == before


def empty_all(value: object) -> None:
    match value:
        case dict():
            for inner in value.values():
                empty_all(inner)
            value.clear()
        case list():
            for inner in value:
                empty_all(inner)
            value.clear()
        case _:
            pass


@given(OBJECTS)
def test_base64_decodes_to_the_encoded_configuration(value: dict[str, object]) -> None:
    text = base64.urlsafe_b64encode(json.dumps(value).encode()).decode()
    assert read(text) == value
    assert name_of(text) is None


def test_a_file_is_read_by_path_or_by_name(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('\ufeff{"a": [1, 2,], } // end', encoding="utf-8")
    assert read(file) == read(str(file)) == {"a": [1, 2]}
    assert name_of(file) == str(file)


def test_infinity_is_a_number() -> None:
    assert parse('{"steps_per_print": Infinity}', "text") == {"steps_per_print": float("inf")}


def test_comment_marks_and_commas_inside_strings_are_kept() -> None:
    text = '{"path": "s3://a/b#c", "odd": ",]", "escaped": "\\"// no"}'
    assert parse(text, "text") == {"path": "s3://a/b#c", "odd": ",]", "escaped": '"// no'}


def test_a_duplicate_key_is_rejected_with_its_path(tmp_path: Path) -> None:
    file = tmp_path / "duplicate.json"
    file.write_text('{"zero_optimization": {"stage": 1, "stage": 2}}')
    line = f"{file}: zero_optimization.stage: duplicate key; keep one"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        read(file)


def test_every_duplicate_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*a: duplicate key(.|\n)*b\[1\]\.c: duplicate key"):
        parse('{"a": 1, "a": 2, "b": [{}, {"c": 1, "c": 1}]}', "text")


def test_a_missing_file_error_names_the_searched_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"^absent\.json: no such file \(looked in {re.escape(str(tmp_path))}\)"):
        read("absent.json")


def test_a_folder_is_not_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read(tmp_path)


def test_a_file_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "binary.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text; give a JSON file"):
        read(file)


def test_invalid_json_is_rejected_with_line_and_column() -> None:
    with pytest.raises(ConfigError, match=r"^my\.json: line 3, column 4: .*; give valid JSON$"):
        parse('{/* a\n comment */ "a": 1,\n   b: 2}', "my.json")


def test_json_that_is_not_an_object_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^my\.json: contains a JSON list; give an object: \{\.\.\.\}$"):
        parse("[1]", "my.json")


def test_a_key_that_is_not_a_string_is_rejected_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.3: the key is not a string; give a string$"):
        read({"optimizer": {3: 1}})


def test_a_source_of_another_type_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^config: got a list; give a path, a dict or URL-safe base64 of JSON$"):
        read([1])  # type: ignore[arg-type]
