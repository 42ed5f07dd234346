"""A comparison as text: the reason first, then the parts, what else moved, and every figure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from npusim.report.text import Block, Cell, Facts, Grid, Heading, Style, percent, whole
from npusim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.report.compare import ComparedFigure, Comparison, Kind, Moved, Value
    from npusim.report.sheet import Breakdown, Part

#: Rows of parts and of what moved that are shown; JSON has them all.
SHOWN = 10


def comparison_table(comparison: Comparison) -> tuple[Block, ...]:
    """Return what ``npusim compare`` prints."""
    c = comparison
    blocks: list[Block] = [Heading(f"{c.labels[0]} -> {', '.join(c.labels[1:])}")]
    if c.problems:
        text = "; ".join(f"{key} {_arrow(c.differences[key])}" for key in c.problems)
        blocks.append(Facts((("different problems", (Cell(f"times are not of the same work: {text}", "warn"),)),)))
    inputs = [(key, (Cell(_arrow(v)),)) for key, v in c.differences.items() if key not in c.problems]
    if inputs or not c.problems:
        blocks.append(Facts(tuple(inputs) or (("inputs", (Cell("the same"),)),)))
    if c.latency is not None:
        blocks.append(Facts(tuple(_reasons(c, c.latency))))
        blocks.append(_parts(c.latency))
    if c.moved:
        blocks.append(_moved(c))
    blocks.append(_figures(c))
    return tuple(blocks)


def reason(latency: Breakdown, run: int) -> str:
    """Return in a sentence why run ``run`` takes longer or shorter than the first."""
    old, new = (latency.sheets[i] for i in (0, run))
    before, after = (s.us(s.cycles or 0) + s.launch_us for s in (old, new))
    change = after - before
    unit = " -> ".join(dict.fromkeys((latency.units[0], latency.units[run])))
    if not latency.moved(run):
        return f"as long as {old.label}: nothing moved in {unit}"
    causes = [f"{p} {latency.change_us(p, run):+,.2f} us" for p in latency.causes(run)]
    against = [p for p in latency.moved(run) if latency.change_us(p, run) * change < 0]
    but = f"; against that {against[0]} {latency.change_us(against[0], run):+,.2f} us" if against else ""
    share = f" ({change / before * 100:+.1f} %)" if before else ""
    much = f"{abs(change):,.2f} us {'longer' if change > 0 else 'shorter'}{share}" if change else "as long"
    return f"{much}: {unit}: {', '.join(causes)}{but}"


def _reasons(c: Comparison, latency: Breakdown) -> Iterator[tuple[str, tuple[Cell, ...]]]:
    many = len(c.sheets) > 2
    for run in range(1, len(c.sheets)):
        texts = [Cell(reason(latency, run))]
        if c.chains[run]:
            steps = [f"{s.unit} {s.part} {s.part.cycles[1] - s.part.cycles[0]:+,}" for s in c.chains[run]]
            texts.append(Cell("behind the first, in cycles: " + " < ".join(steps), "dim"))
        yield (f"why {c.labels[run]}" if many else "why"), tuple(texts)
    unit = ", ".join(dict.fromkeys(latency.units))
    yield "parts", (Cell(f"what {unit} spends the time on, in the core group that ends last"),)


def _parts(latency: Breakdown) -> Grid:
    """Return the parts that moved, the largest first, the rest as one, and their sum."""
    runs = range(1, len(latency.sheets))
    moved = [p for p in latency.ranked if any(latency.change_us(p, i) for i in runs)]
    shown = moved[:SHOWN]
    rest = [p for p in latency.parts if p not in shown]
    rows = [_part_row(latency, f"{p}", [p]) for p in shown]
    if rest:
        still = "all others" if len(moved) > SHOWN else "all others, unchanged"
        rows.append(_part_row(latency, still, rest, "dim"))
    rows.append(_part_row(latency, "latency", latency.parts, "title"))
    names = [s.label for s in latency.sheets]
    head = [f"{names[0]} us"]
    for name in names[1:]:
        head += [f"{name} us", "change", *(["cycles"] if latency.is_one_clock else [])]
    return Grid(("", *head), "<" + ">" * len(head), tuple(rows))


def _part_row(latency: Breakdown, name: str, parts: Sequence[Part], style: Style = "") -> tuple[Cell, ...]:
    runs = range(len(latency.sheets))
    cycles = [sum(p.cycles[i] for p in parts) for i in runs]
    us = [sum(latency.us(p, i) for p in parts) for i in runs]
    found = [Cell(f"{us[0]:,.2f}", style)]
    for total, took in zip(cycles[1:], us[1:], strict=True):
        change = took - us[0] if any(latency.change_us(p, i) for p in parts for i in runs) else 0.0
        colour: Style = style if style == "dim" or not change else "bad" if change > 0 else "good"
        found += [Cell(f"{took:,.2f}", style), Cell(f"{change:+,.2f}" if change else "=", colour)]
        if latency.is_one_clock:
            found.append(Cell(f"{total - cycles[0]:+,}" if total != cycles[0] else "=", colour))
    return (Cell(name, style or "label"), *found)


def _moved(c: Comparison) -> Grid:
    """Return the operations and waits of all units that moved most."""
    rows = [_moved_row(m) for m in c.moved[:SHOWN]]
    left = len(c.moved) - len(rows)
    if left:
        rows.append((Cell(f"and {left} more: --json", "dim"), *(Cell("") for _ in range(1 + 2 * len(c.sheets)))))
    head: list[str] = [f"{c.labels[0]} cycles"]
    for name in c.labels[1:]:
        head += [name, "change"]
    return Grid(("moved: unit", "operation, or wait", *head, "times"), "<<" + ">" * len(head) + ">", tuple(rows))


def _moved_row(m: Moved) -> tuple[Cell, ...]:
    cycles = m.part.cycles
    found = [Cell(whole(cycles[0]))]
    for total in cycles[1:]:
        found += [Cell(whole(total)), Cell(f"{total - cycles[0]:+,}" if total != cycles[0] else "=")]
    times = " -> ".join(dict.fromkeys(map(whole, m.times)))
    return (Cell(m.unit, "label"), Cell(str(m.part)), *found, Cell(times))


def _figures(c: Comparison) -> Grid:
    rows = []
    for figure in c.figures:
        if _repeats(figure, c.figures):
            continue
        found = [Cell(_written(figure.kind, figure.values[0]))]
        for run in range(1, len(c.sheets)):
            found.append(Cell(_written(figure.kind, figure.values[run])))
            found.append(Cell(figure.change(run), _style(figure, run)))
        rows.append((Cell(figure.name, "label"), *found))
    head = [c.labels[0]]
    for name in c.labels[1:]:
        head += [name, "change"]
    return Grid(("", *head), "<" + ">" * len(head), tuple(rows))


def _repeats(figure: ComparedFigure, figures: tuple[ComparedFigure, ...]) -> bool:
    """Return whether a second core of a kind only repeats what the first one's row says."""
    first = re.sub(r"core[1-9]\d* ", "core0 ", figure.name)
    twins = [f for f in figures if f.name == first and first != figure.name]
    return any(f.values == figure.values for f in twins)


def _written(kind: Kind, value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    match kind:
        case "time":
            return f"{value:,.2f}"
        case "share":
            return percent(value)
        case "bytes":
            return format_bytes(int(value))
        case "error":
            return f"{value:.2e}"
    return whole(int(value))


def _arrow(values: Sequence[object]) -> str:
    return " -> ".join("-" if value is None else str(value) for value in values)


def _style(figure: ComparedFigure, run: int) -> Style:
    """Return green for less of what one wants less of, red for more; neither for busy shares."""
    change = figure.relative_change(run)
    wanted_less = figure.kind in ("time", "cycles", "error", "bytes")
    if change is None or not change or not wanted_less:
        return ""
    return "good" if change < 0 else "bad"
