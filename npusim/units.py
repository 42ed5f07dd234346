"""Integer helpers for quantities whose names carry their unit: ``_bytes``, ``_cycles``, ``_hz``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1024
MIB = 1024 * KIB


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator`` rounded up; both integers, ``denominator`` positive."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return ceil_div(value, multiple) * multiple


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, length)`` of the pieces of ``total``, the last one ragged."""
    for start in range(0, total, size):
        yield start, min(size, total - start)


def format_bytes(count: int) -> str:
    """Return ``count`` bytes as people write it: ``384 KiB``, ``1.5 MiB``, ``100 B``."""
    for unit, size in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            scaled = count / size
            return f"{scaled:.0f} {unit}" if count % size == 0 else f"{scaled:.1f} {unit}"
    return f"{count} B"


def format_duration(seconds: float) -> str:
    """Return a duration with a readable unit: ``1.92 ms``, ``33.1 us``, ``2.50 s``, ``25 min``, ``3.4 h``."""
    for unit, size, digits in (("days", 86400.0, 1), ("h", 3600.0, 1), ("min", 60.0, 0)):
        if seconds >= 5 * size or (unit == "h" and seconds >= 2 * size):
            return f"{seconds / size:,.{digits}f} {unit}"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e9:.1f} ns"
