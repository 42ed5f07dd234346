from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npusim.config.document import read_inherited
from npusim.config.load import load_device
from npusim.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BASE = "schema: npusim.device/1\nextends: ascend_910b2\nname: mine\n"
QUANTITY = '{value: 1024, basis: assumed, source: "a test"}'


def _beside(name: str, extending: Path) -> Path:
    return extending.parent / f"{name}.yaml"


def test_mappings_are_merged_and_the_rest_is_kept(write: Callable[..., Path]) -> None:
    write("a: {b: 1, c: {d: 2, e: 3}}\nf: 4\n", "base.yaml")
    path = write("extends: base\na: {c: {e: 30, g: 5}}\n")
    document = read_inherited(path, _beside)
    assert document.data == {"a": {"b": 1, "c": {"d": 2, "e": 30, "g": 5}}, "f": 4}


def test_dotted_keys_are_the_same_as_nested_ones(write: Callable[..., Path]) -> None:
    write("a: {b: 1, c: {d: 2}}\n", "base.yaml")
    nested = read_inherited(write("extends: base\na: {c: {d: 5}}\n", "nested.yaml"), _beside)
    dotted = read_inherited(write("extends: base\na.c.d: 5\n", "dotted.yaml"), _beside)
    assert nested.data == dotted.data == {"a": {"b": 1, "c": {"d": 5}}}
    assert str(dotted.position_of("a.c.d")).endswith("dotted.yaml:2")


def test_quantities_are_replaced_whole(write: Callable[..., Path]) -> None:
    write("a: {value: 1, basis: fitted, source: x, fitted_on: [y]}\n", "base.yaml")
    path = write("extends: base\na: {value: 2, basis: vendor, source: z}\n")
    document = read_inherited(path, _beside)
    assert document.data == {"a": {"value": 2, "basis": "vendor", "source": "z"}}
    assert "a.fitted_on" not in document.places


def test_null_takes_away_what_the_other_file_has_and_nothing_else(write: Callable[..., Path]) -> None:
    write("a: {b: 1, c: {d: 2}}\ne: 3\n", "base.yaml")
    assert read_inherited(write("extends: base\na: {c: null}\ne: null\n"), _beside).data == {"a": {"b": 1}}
    with pytest.raises(SpecError, match=r"mine\.yaml:2  a\.f: null removes .* has b, c here"):
        read_inherited(write("extends: base\na: {f: null}\n"), _beside)


def test_null_may_remove_what_the_other_file_has_removed(write: Callable[..., Path]) -> None:
    """Not what none of the files ever had, nor below it: that is a slip of the pen."""
    write("a: {b: 1, c: 2}\ne: 3\n", "base.yaml")
    write("extends: {file: base, basis: assumed}\na: {c: null}\ne: null\n", "parent.yaml")
    for extends in ("parent", "{file: parent, basis: assumed}"):
        path = write(f"extends: {extends}\na: {{c: null}}\ne: null\n")
        assert read_inherited(path, _beside).data == {"a": {"b": 1}}
    with pytest.raises(SpecError, match=r"a\.g: null removes .* has b here"):
        read_inherited(write("extends: parent\na: {g: null}\n"), _beside)


def test_what_an_anchor_shares_is_changed_in_one_place_only(write: Callable[..., Path]) -> None:
    write("a: &x {b: 1}\nc: *x\n", "base.yaml")
    document = read_inherited(write("extends: base\nc: {b: 2}\n"), _beside)
    assert document.data == {"a": {"b": 1}, "c": {"b": 2}}


def test_extends_may_be_chained(write: Callable[..., Path]) -> None:
    write("a: 1\nb: 1\nc: 1\n", "first.yaml")
    write("extends: first\nb: 2\nc: 2\n", "second.yaml")
    document = read_inherited(write("extends: second\nc: 3\n"), _beside)
    assert document.data == {"a": 1, "b": 2, "c": 3}


def test_circles_are_refused(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    write("a: 1\nextends: mine\n", "other.yaml")
    path = write("extends: other\n")
    other = path.parent / "other.yaml"
    expected = f"{other}:2  extends: files extend each other in a circle: mine -> other -> mine"
    assert fault(read_inherited, path, _beside) == expected


def test_extends_must_be_a_name(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    wanted = "expected the name of another file, or {file: NAME, basis: assumed}, with keys: [PATTERN, ...], got "
    for given in (
        "['a']",
        "{'file': 'base', 'basis': 'vendor'}",
        "{'basis': 'assumed'}",
        "{'file': 'base', 'basis': 'assumed', 'keys': 'a'}",
    ):
        path = write(f"extends: {given}\n")
        assert fault(read_inherited, path, _beside) == f"{path}:1  extends: {wanted}{given}"


def test_numbers_of_another_chip_are_assumed_and_say_whose_they_are(write: Callable[..., Path]) -> None:
    kept = "b: {value: 2, basis: measured, source: s}\nfacts: {c: {value: 3, basis: vendor, source: t}}\n"
    write("a: {b: {value: 1, basis: vendor, source: r}}\n" + kept.replace("b:", "d:", 1), "base.yaml")
    path = write("extends: {file: base, basis: assumed}\n" + kept.replace("facts", "f"))
    found = read_inherited(path, _beside).data
    as_base = {"basis": "assumed", "source": "assumed to be as on the base: "}
    assert found == {
        "a": {"b": {"value": 1, **as_base, "source": "assumed to be as on the base: r"}},
        "d": {"value": 2, **as_base, "source": "assumed to be as on the base: s"},
        "b": {"value": 2, "basis": "measured", "source": "s"},
        "f": {"c": {"value": 3, "basis": "vendor", "source": "t"}},
    }


def test_of_another_chip_comes_what_keys_name_and_nothing_else(
    write: Callable[..., Path], fault: Callable[..., str]
) -> None:
    write("a: {b: {c: 1, d: 2}, e: {c: 3}}\nf: 4\n", "base.yaml")
    path = write("extends: {file: base, basis: assumed, keys: [a.*.c]}\nf: 5\n")
    assert read_inherited(path, _beside).data == {"a": {"b": {"c": 1}, "e": {"c": 3}}, "f": 5}
    path = write("extends: {file: base, basis: assumed, keys: [a.b.*, a.g]}\n")
    assert fault(read_inherited, path, _beside) == f"{path}:1  extends: keys: base has no key a.g"


def test_a_changed_value_without_basis_is_refused(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    path = write(f"{BASE}group_count: {{value: 20}}\n")
    assert fault(load_device, path).splitlines() == [
        f"{path}:4  group_count.basis: missing; state how the value is known: "
        "vendor | measured | derived | fitted | assumed",
        f"{path}:4  group_count.source: missing; state the source of the value",
    ]


def test_an_unknown_key_names_the_overriding_file(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    path = write(f"{BASE}memory:\n  l2:\n    capacity_byte: {QUANTITY}\n")
    expected = f"{path}:6  memory.l2.capacity_byte: unknown key. Did you mean `capacity_bytes`?"
    assert fault(load_device, path) == expected


def test_a_file_may_extend_another_beside_it(write: Callable[..., Path]) -> None:
    write(f"{BASE}group_count: {QUANTITY}\n", "base.yaml")
    path = write("extends: base.yaml\nname: child\n", "child.yaml")
    device = load_device(path)
    assert (device.name, device.group_count.value) == ("child", 1024)


def test_an_unknown_base_is_refused(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    path = write("extends: ascend_910b9\n")
    assert fault(load_device, path).startswith(f"{path}:1  extends: no device named 'ascend_910b9'")
