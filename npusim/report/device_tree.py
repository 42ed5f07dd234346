"""The numbers of a device as a tree, each with its unit; their sources on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.config.bands import validated_schedules
from npusim.config.messages import suggest
from npusim.config.quantity import BASES
from npusim.errors import SpecError
from npusim.report.text import Block, Cell, Fact, Facts, Grid, Heading, Style, cells
from npusim.units import format_bytes, format_duration

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.quantity import Sourced

#: Ends of keys, and the units of their values; the longest end that matches determines the unit.
_UNITS: Mapping[str, str] = MappingProxyType(
    {
        "bytes_per_cycle": "B/cycle",
        "elements_per_cycle": "elements/cycle",
        "cycles_per_repeat": "cycles/repeat",
        "cycles_per_fractal": "cycles/fractal",
        "cycles_per_element": "cycles/element",
        "_cycles": "cycles",
        "_w": "W",
    }
)
#: Units that have decimal prefixes.
_SCALED: Mapping[str, str] = MappingProxyType({"flops_per_s": "FLOP/s", "bytes_per_s": "B/s", "_hz": "Hz"})
_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
#: Bases that are weak evidence.
_UNCERTAIN = ("assumed", "fitted")
_INDENT = "  "
#: Number of characters of a key and its value on one line: with the basis, the line has at most 80 columns.
WIDTH = 68

#: The numbers of a device, as a tree whose levels are the parts of their keys.
Tree = dict[str, "Tree | Sourced"]


def quantity_text(key: str, value: object) -> str:
    """Return the value of a device's key with its unit: ``1.6 TB/s``, ``512 KiB``, ``300 cycles``.

    Examples
    --------
    >>> quantity_text("links.hbm.bytes_per_s", 1.6e12), quantity_text("l1.capacity_bytes", 524288)
    ('1.6 TB/s', '512 KiB')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.endswith("bytes"):
        text = format_bytes(int(value))
        return f"{value:,} B" if "." in text else text
    for end, unit in _SCALED.items():
        if key.endswith(end):
            prefix, size = next((each for each in _PREFIXES if abs(value) >= each[1]), _PREFIXES[-1])
            return f"{value / size:.6g} {prefix}{unit}"
    for end, unit in _UNITS.items():
        if key.endswith(end):
            return f"{value:.6g} {unit.replace('cycles', 'cycle', 1) if value == 1 else unit}"
    if key.endswith("_s"):
        return format_duration(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def device_table(
    device: DeviceSpec, only: str = "", basis: str | None = None, *, has_sources: bool = False
) -> tuple[Block, ...]:
    """Return the numbers of a device whose keys start with ``only``, or whose basis is ``basis``; raise `SpecError` if
    there are no such numbers.
    """
    if basis is not None and basis not in BASES:
        raise SpecError(f"--basis {basis}{suggest(basis, BASES)}")
    rows = [(key, fact) for key, fact in device.facts() if key.startswith(only) and basis in (None, fact.basis)]
    if not rows:
        parts = sorted({key.partition(".")[0] for key, _ in device.facts()})
        where, of = f" whose key starts with {only!r} (--only)" if only else "", f" of basis {basis}" if basis else ""
        raise SpecError(f"{device.name} has no number{where}{of}{suggest(only.partition('.')[0], parts)}")
    heading = Heading(device.name, f"{device.description}; file {device.digest()}")
    tree = _tree(rows)
    content: Block = Facts(tuple(_sources(tree))) if has_sources else _grid(tree)
    if only or basis:
        return (heading, content)
    validations = [v.text(schedule, device.name) for schedule, v in validated_schedules(device).items()]
    facts = [("measured", cells(*validations or ["no measurement: predicted only"]))]
    if not has_sources:
        facts.append(("sources", cells(f"npusim hw show {device.name} --sources")))
    return (heading, content, Facts(tuple(facts)))


def _tree(rows: list[tuple[str, Sourced]]) -> Tree:
    """Return the numbers as a tree; if a part of a key is a number too, it has a separate branch."""
    tree: Tree = {}
    numbers = dict(rows)
    for key, fact in rows:
        level, path = tree, ""
        *parts, last = key.split(".")
        for part in parts:
            path = f"{path}{part}"
            level = level.setdefault(f"{part}." if path in numbers else part, {})  # type: ignore[assignment]
            path += "."
        level[last] = fact
    return tree


def _lines(tree: Tree, depth: int = 0, path: str = "") -> Iterator[tuple[str, str, Sourced | None]]:
    """Yield each line of a tree: the last part of the key, indented; the complete key; and the number (None: a
    heading).
    """
    for part, branch in tree.items():
        name, below = part, branch
        while isinstance(below, dict) and len(below) == 1:
            more = next(iter(below))
            name, below = f"{name.rstrip('.')}.{more}", below[more]
        key, label = f"{path}{name}", f"{_INDENT * depth}{name}"
        if isinstance(below, dict):
            yield label, key, None
            yield from _lines(below, depth + 1, f"{key.rstrip('.')}.")
        else:
            yield label, key, below


def _style(fact: Sourced) -> Style:
    return "warn" if fact.basis in _UNCERTAIN else ""


def _grid(tree: Tree) -> Grid:
    """Return the tree and its bases; values are aligned in one column; the value of a long key is on the next line."""
    lines = [(label, "" if fact is None else _value(key, fact), fact) for label, key, fact in _lines(tree)]
    width = min(WIDTH, max(len(label) + len(_INDENT) + len(value) for label, value, _ in lines))
    rows = list[tuple[Cell, Cell]]()
    for label, value, fact in lines:
        is_apart = fact is None or len(label) + len(_INDENT) + len(value) > width
        if is_apart:
            rows.append((Cell(label, "label" if fact is None else ""), Cell("")))
        if fact is not None:
            text = f"{value:>{width}}" if is_apart else f"{label}{value:>{width - len(label)}}"
            rows.append((Cell(text), Cell(fact.basis, _style(fact))))
    return Grid((f"key{'value':>{width - len('key')}}", "basis"), "<<", tuple(rows))


def _value(key: str, fact: Sourced) -> str:
    return quantity_text(key, getattr(fact, "value", ""))


def _sources(tree: Tree) -> Iterator[Fact]:
    for label, key, fact in _lines(tree):
        if fact is None:
            yield "", (Cell(label, "label"),)
        else:
            margin = " " * (len(label) - len(label.lstrip())) + _INDENT * 2
            yield (
                "",
                (
                    Cell(f"{label}{_INDENT}{_value(key, fact)}{_INDENT}{fact.basis}", _style(fact)),
                    Cell(f"{margin}{fact.source}", "dim"),
                ),
            )
