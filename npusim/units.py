"""Integer helpers for quantities whose names carry their unit: ``_bytes``, ``_cycles``, ``_hz``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from types import MappingProxyType

KIB = 1024
MIB = 1024 * KIB

_COUNT = re.compile(r"(?P<number>\d{1,30}(_\d{1,30}){0,9}(\.\d{1,30})?) ?(?P<unit>[A-Za-z]*)", re.ASCII)


def ascii_digits(text: str) -> str:
    """Return ``text``; raise `ValueError` unless it is ASCII: `int` and `float` read digits of every script."""
    if not text.isascii():
        raise ValueError(text)
    return text


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator`` rounded up; both integers, ``denominator`` positive."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return ceil_div(value, multiple) * multiple


def plural(count: int, noun: str) -> str:
    """Return a noun in the form after a count: ``case`` after 1, else ``cases``; ``launches``, ``processes``."""
    return noun if count == 1 else f"{noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, length)`` of the pieces of ``total``, the last one ragged."""
    for start in range(0, total, size):
        yield start, min(size, total - start)


def spans(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending indices as runs of consecutive ones, ``(first, last)``.

    Examples
    --------
    >>> spans([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    runs: list[tuple[int, int]] = []
    for index in map(int, indices):
        follows = bool(runs) and runs[-1][1] + 1 == index
        runs.append((runs.pop()[0] if follows else index, index))
    return runs


#: Suffixes of counts: ``8k`` tokens are 8,192, as is usual in the field.
_COUNTS = MappingProxyType({"": 1, "k": KIB, "ki": KIB, "m": MIB, "mi": MIB, "g": 1024 * MIB, "gi": 1024 * MIB})
#: Suffixes of bytes: with an i powers of two, without one powers of ten.
_BYTES = MappingProxyType({"b": 1, "kib": KIB, "mib": MIB, "gib": 1024 * MIB, "kb": 10**3, "mb": 10**6, "gb": 10**9})


def parse_count(text: str, *, is_bytes: bool = False) -> int:
    """Return the positive integer of a text: ``4096``, ``8k`` (8,192), ``1MiB`` of bytes.

    Raises `ValueError` for anything else, including a number with a fraction.

    Examples
    --------
    >>> parse_count("8k"), parse_count("1.5MiB", is_bytes=True), parse_count("4_096")
    (8192, 1572864, 4096)
    """
    match = _COUNT.fullmatch(text.strip())
    units = {**_COUNTS, **_BYTES} if is_bytes else _COUNTS
    size = units.get(match["unit"].lower()) if match else None
    if match is None or size is None:
        raise ValueError(text)
    exact = Fraction(match["number"].replace("_", "")) * size
    if exact.denominator != 1 or exact < 1:
        raise ValueError(text)
    return int(exact)


def format_value(value: object) -> str:
    """Return a value as a command line states it: numbers with an exponent in their shortest form, ``3.35e12``.

    Examples
    --------
    >>> format_value(3.35e12), format_value(4096.0), format_value(1e-6), format_value(0.1), format_value("auto")
    ('3.35e12', '4096.0', '1e-6', '0.1', 'auto')
    """
    short = f"{value:g}" if isinstance(value, float) else ""
    is_exact = "e" in short and float(short) == value
    return re.sub(r"e\+?(-?)0*", r"e\1", short) if is_exact else str(value)


def format_bytes(count: int) -> str:
    """Return ``count`` bytes as people write it: ``384 KiB``, ``1.5 MiB``, ``100 B``."""
    for unit, size in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            scaled = count / size
            return f"{scaled:.0f} {unit}" if count % size == 0 else f"{scaled:.1f} {unit}"
    return f"{count} B"


def format_duration(seconds: float) -> str:
    """Return a duration with a readable unit: ``1.92 ms``, ``33.1 us``, ``2.50 s``, ``25 min``, ``3.4 h``."""
    for unit, size, digits in (("years", 365.25 * 86400, 1), ("days", 86400.0, 1), ("h", 3600.0, 1), ("min", 60.0, 0)):
        if seconds >= 5 * size or (unit == "h" and seconds >= 2 * size):
            return f"{seconds / size:,.{digits}f} {unit}"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e9:.1f} ns"
