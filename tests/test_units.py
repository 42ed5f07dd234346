from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config.load import load_device
from npusim.config.yaml_text import parse_scalar
from npusim.errors import SpecError
from npusim.units import format_value, parse_count, plural

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1), ("4_096", 4096), ("8k", 8192), ("8 K", 8192), ("1.5Ki", 1536), ("2M", 1 << 21), ("128k", 131072)],
)
def test_counts_are_read_as_the_field_writes_them(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("1MiB", 1 << 20), ("1.5 MiB", 3 << 19), ("1MB", 10**6), ("64kib", 65536), ("12 B", 12), ("2k", 2048)],
)
def test_bytes_with_an_i_are_powers_of_two(text: str, number: int) -> None:
    assert parse_count(text, is_bytes=True) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "k",
        "0",
        "-1",
        "0k",
        "1.5",
        "0.0001k",
        "1e3",
        "8kk",
        "8q",
        "٣",
        "1_",
        "1__1",
        "1MiB",
        "1/2",
        "nan",
        "1" * 99,
        "1 000",
    ],
)
def test_anything_else_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_count(text)


def test_bytes_of_a_device_are_read_so_too(tmp_path: Path) -> None:
    """After -C, and in a file."""
    device = load_device("ascend_910b2", {"memory.l2.capacity_bytes": "96 MiB"})
    assert device.memory.l2 is not None
    assert device.memory.l2.capacity_bytes.value == 96 << 20
    head = "schema: npusim.device/1\nname: mine\ndescription: mine\nextends: ascend_910b2\n"
    for text, number in (("96MiB", 96 << 20), ("100663296", 96 << 20), ("1.5 GB", 1_500_000_000)):
        value = f"{{value: {text}, basis: assumed, source: mine}}"
        (tmp_path / "mine.yaml").write_text(f"{head}memory: {{l2: {{capacity_bytes: {value}}}}}\n")
        mine = load_device(tmp_path / "mine.yaml").memory.l2
        assert mine is not None
        assert mine.capacity_bytes.value == number
    for key, text in (("memory: {l2: {capacity_bytes", "96XiB"), ("memory: {l2: {miss_extra_latency_cycles", "1MiB")):
        (tmp_path / "mine.yaml").write_text(f"{head}{key}: {{value: {text}, basis: assumed, source: mine}}}}}}\n")
        with pytest.raises(SpecError, match=f"mine.yaml:5  .*{text}"):
            load_device(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.35e12, "3.35e12"),
        (4e12, "4e12"),
        (1e-6, "1e-6"),
        (1e6, "1e6"),
        (4096.0, "4096.0"),
        (0.1, "0.1"),
        (1234567890123.0, "1234567890123.0"),
        (1 / 3, str(1 / 3)),
        (7, "7"),
        (True, "True"),
        ("auto", "auto"),
    ],
)
def test_values_are_stated_as_a_command_line_has_them(value: object, text: str) -> None:
    """3.35e12 was printed as 3350000000000.0."""
    assert format_value(value) == text
    if isinstance(value, float):
        assert parse_scalar(text) == value
        assert type(parse_scalar(text)) is float


def test_a_search_over_numbers_of_a_device_states_them_so() -> None:
    found = npusim.explore("flash", seq=256, hw="h200", fields={"links.hbm.bytes_per_s": [3.35e12]})
    assert found.best is not None
    assert found.best.label() == "links.hbm.bytes_per_s=3.35e12"
    assert found.command(found.best).endswith("-C links.hbm.bytes_per_s=3.35e12")


def test_one_process_is_no_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("npusim.cli.explore_command.LONG_S", 0.0)
    asked = ["explore", "flash", "--seq", "256", "-f", "block_kv=128", "-j1"]
    said = CliRunner().invoke(app, asked).stderr
    assert "1 point in 1 family, about 0 s with 1 process;" in said
    assert [plural(2, noun) for noun in ("case", "launch", "process")] == ["cases", "launches", "processes"]


def test_a_noun_follows_its_count() -> None:
    assert [plural(n, "case") for n in (0, 1, 2)] == ["cases", "case", "cases"]
