from __future__ import annotations

import re

import pytest

from npusim.config.load import load_device
from npusim.units import parse_count, plural


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


def test_bytes_of_a_device_are_read_so_too() -> None:
    device = load_device("ascend_910b2", {"memory.l2.capacity_bytes": "96 MiB"})
    assert device.memory.l2 is not None
    assert device.memory.l2.capacity_bytes.value == 96 << 20


def test_a_noun_follows_its_count() -> None:
    assert [plural(n, "case") for n in (0, 1, 2)] == ["cases", "case", "cases"]
