from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npusim import cache
from npusim.config import document
from npusim.config.document import parse_document, read_document
from npusim.config.yaml_text import parse_scalar
from npusim.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_scalars_are_read_as_yaml_1_2() -> None:
    text = "a: 1.85e9\nb: 1e12\nc: off\nd: 12:30\ne: true\nf: 0x10\ng: 2026-11-21\nh:\ni: 'true'\n"
    data = parse_document(text, file="f").data
    # YAML 1.1 (PyYAML) reads these as '1.85e9', '1e12', False, 750 and a date.
    expected = {"a": 1.85e9, "b": 1e12, "c": "off", "d": "12:30", "e": True, "f": 16}
    assert data == expected | {"g": "2026-11-21", "h": None, "i": "true"}
    assert isinstance(data["a"], float)


def test_places_are_the_lines_of_keys_and_of_list_items() -> None:
    document = parse_document("a:\n  b: 1\n  c:\n    - x\n    - {y: 2}\n", file="f.yaml")
    assert {key: place.line for key, place in document.places.items()} == {
        "": 1,
        "a": 1,
        "a.b": 2,
        "a.c": 3,
        "a.c.0": 4,
        "a.c.1": 5,
        "a.c.1.y": 5,
    }


def test_place_of_a_missing_key_is_its_parents() -> None:
    document = parse_document("a:\n  b:\n    c: 1\n", file="f.yaml")
    assert document.line("a.b.missing.deeper", "text") == "f.yaml:2  a.b.missing.deeper: text"


def test_aliases_stand_for_their_anchor() -> None:
    document = parse_document("a: &x {v: 1}\nb: *x\n", file="f.yaml")
    assert document.data == {"a": {"v": 1}, "b": {"v": 1}}
    assert document.position_of("b.v").line == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3  a: duplicate key; first given in line 1"),
        ("a:\n  b: 1\n  b: 1\n", "f.yaml:3  a.b: duplicate key; first given in line 2"),
        ("a: {b: 1, b: 2}\n", "f.yaml:1  a.b: duplicate key; first given in line 1"),
        ("", "f.yaml:1  the file is empty"),
        ("- 1\n", "f.yaml:1  the file is not a mapping of keys to values"),
        ("a: !odd 1\n", "f.yaml:1  a: tag !odd is not supported"),
        (
            "a: 1\nb: [1, 2\n",
            "f.yaml:3  not valid YAML: while parsing a flow sequence (it starts in line 2), expected ',' or ']', but "
            "the file ends",
        ),
        (
            'a: 1\nb: "two\nc: 3\n',
            "f.yaml:4  not valid YAML: while scanning a quoted scalar (it starts in line 2), the file ends before the "
            "closing quote",
        ),
        ("a: 1\n  b: 2\n", "f.yaml:2  not valid YAML: a key is not allowed here: check the indentation"),
        ("a: 1\nb\nc: 2\n", "f.yaml:3  not valid YAML: while scanning a simple key (it starts in line 2), no ':'"),
        ("a: 1\n---\nb: 1\n", "f.yaml:2  not valid YAML: "),
        ("a: 1\n\tb: 2\n", "f.yaml:2  not valid YAML: "),
        ("a: *gone\n", "f.yaml:1  not valid YAML: found undefined alias 'gone'"),
        ("a: &x 1\nb: *x\nc: &x 2\n", "f.yaml:3  duplicate anchor 'x'"),
        ("a: &x {b: *x}\n", "f.yaml:1  an alias is inside its own anchor"),
        ("a: " + "[" * 500 + "]" * 500, "f.yaml:1  nested too deeply"),
        ("a: !!bool x\n", "f.yaml:1  a: 'x' cannot be read as bool"),
        ("a: !!int\n", "f.yaml:1  a: '' cannot be read as int"),
        ("a: 1e999999\nb: !!int x\n", "f.yaml:2  b: 'x' cannot be read as int"),
        ("? [a, b]\n: 1\n", "f.yaml:1  : a key must be plain text"),
    ],
)
def test_faulty_text_is_refused_with_its_line(text: str, message: str, fault: Callable[..., str]) -> None:
    assert fault(parse_document, text, file="f.yaml").startswith(message)


def test_a_file_is_parsed_once_as_long_as_its_text_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    file, copy = tmp_path / "device.yaml", tmp_path / "other" / "device.yaml"
    copy.parent.mkdir()
    for path in (file, copy):
        path.write_text("a: &x {b: 1e12, c: [on, 0x10, .inf, null]}\nd: *x\n")
    first = read_document(file)
    monkeypatch.setattr(document, "parse_document", None)
    assert read_document(file) == first
    assert read_document(copy).line("d.b", "text") == f"{copy}:1  d.b: text"
    monkeypatch.undo()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(document, "_parser", lambda: "another version")
    assert read_document(file) == first
    file.write_text("\na: 1\na: 2\n")
    for _ in range(2):  # a faulty file is not kept
        with pytest.raises(SpecError, match=r"device.yaml:3  a: duplicate key; first given in line 2"):
            read_document(file)


def test_unreadable_files_are_refused_with_the_reason(tmp_path: Path, fault: Callable[..., str]) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    gone = tmp_path / "gone.yaml"
    assert fault(read_document, binary) == f"{binary}: cannot be read: not UTF-8 text"
    assert fault(read_document, gone) == f"{gone}: cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("text", "value"), [("300", 300), ("1.5e9", 1.5e9), ("scalar", "scalar"), ("true", True), ("[1, 2]", "[1, 2]")]
)
def test_command_line_text_is_read_as_a_scalar(text: str, value: object) -> None:
    assert parse_scalar(text) == value


@pytest.mark.parametrize("text", ["", "a: [", "'open", "&", "\t", pytest.param("[" * 500, id="deep")])
def test_command_line_text_that_is_no_yaml_stays_text(text: str) -> None:
    assert parse_scalar(text) == text
