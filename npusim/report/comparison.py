"""Runs side by side: the differences of their inputs and times, with the reason; as text and as a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, Literal

from npusim.errors import SpecError
from npusim.frames import frame
from npusim.late_methods import dataclass
from npusim.machines.tracks import track_of
from npusim.program.timing.timing_result import method_text
from npusim.report import charts
from npusim.report.bits_table import COMPARABLE_ULP
from npusim.report.charts import Figure, FigureTile, PagePart, Row
from npusim.report.sheet import Breakdown, Moved, Part, Sheet, breakdown, chain, parts_of, sheets_of
from npusim.report.text import (
    Block,
    Cell,
    Column,
    Columns,
    Fact,
    Facts,
    Grid,
    Heading,
    Style,
    cells,
    document,
    keyed,
    percent,
    plain,
    pre_html,
    whole,
)
from npusim.units import format_bytes, plural

if TYPE_CHECKING:
    from npusim.report.result_json import RunRecord
    from npusim.simulation.run_result import RunData

Value = int | float | str | None
Kind = Literal["time", "cycles", "count", "share", "bytes", "error", "text"]

#: Ratios of errors within these bounds are written in percent, others as factors.
_NEAR = (0.5, 2.0)
#: Numbers of parts and of changes that the terminal shows, and of parts that a chart shows; JSON has them all.
SHOWN, DRAWN = 10, 8
#: Number of differing inputs that the comparison's ``repr`` names.
NAMED = 3
#: Letters of the longest label above a column: three runs with such labels fit a terminal.
LABEL_LETTERS = 10
POINTS = Columns(
    Column("run", "name"), Column("latency us", "latency_us", ",.2f"), Column("relative RMSE", "error", ".2e")
)
#: The JSON form of the time of a unit's part; it occurs in parts, and in changes that have a part.
_PART = keyed("kind", "name", "cycles", "givers")
STEP = Columns(
    Column("moved: unit", "unit", style="label", key="unit"),
    *(replace(column, value=attrgetter(f"part.{column.key}")) for column in _PART),
)
#: Columns of a unit's change; tables insert columns with the cycles of each run.
MOVED = Columns(
    *STEP.columns,
    Column("operation, or wait", "part", str),
    Column(
        "times",
        lambda m: " -> ".join(dict.fromkeys(map(whole, m.times))),
        align=">",
        key="times",
        json=attrgetter("times"),
    ),
)


@dataclass(frozen=True)
class ComparedFigure:
    """One quantity of every run; ``kind`` decides how it and its change are written."""

    name: str
    kind: Kind
    values: tuple[Value, ...]

    def relative_change(self, run: int = 1) -> float | None:
        """(new - old) / old relative to the first run; None for text, for missing figures, and if old is 0."""
        old, new = self.values[0], self.values[run]
        if not isinstance(old, int | float) or not isinstance(new, int | float):
            return None
        return (new - old) / old if old else None

    def change(self, run: int = 1) -> str:
        """The change in the words of its kind: ``-29.2 %``, ``+18.0 pt``, ``x1.20``, ``+3``."""
        old, new = self.values[0], self.values[run]
        if old is None or new is None:
            return ""
        if isinstance(old, str) or isinstance(new, str):
            return "" if old == new else "changed"
        difference = new - old
        if not difference:
            return "="
        if self.kind == "share":
            return f"{difference * 100:+.1f} pt"
        if self.kind == "count":
            return f"{difference:+,}"
        if not old:
            return "new"
        ratio = new / old
        if self.kind == "error" and not _NEAR[0] < ratio < _NEAR[1]:
            return f"x{ratio:.3g}"
        change = f"{difference / old * 100:+.1f} %"
        return "~0 %" if change in ("+0.0 %", "-0.0 %") else change


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `npusim.compare`: runs compared with the first run.

    Attributes
    ----------
    labels : tuple of str
        Names of the runs.
    differences : dict of str to tuple
        Inputs that differ, by dotted key, with each run's value.
    problems : tuple of str
        Keys of the inputs that change the problem; if there are any, the times are for different work.
    figures : tuple of ComparedFigure
        Quantities of every run; the name of each states its unit (``latency us``, ``cycles``, ``relative RMSE``).
    latency : Breakdown or None
        Each run's time in parts that add up to it, in cycles; None if a run has no time.
    moved : tuple of Moved
        Changes of all units in the core group that ends last, in cycles, the largest first.
    chains : tuple of tuple of Moved
        For each run the operations that lead to its first cause, if that is a wait.
    sheets : tuple of Sheet
        The runs in the form in which they are compared.

    Examples
    --------
    >>> import npusim
    >>> comparison = npusim.compare("flash", "pasa", seq=64, numerics=False)
    >>> comparison.labels, comparison.problems
    (('flash', 'pasa'), ())
    """

    sheets: tuple[Sheet, ...]
    differences: dict[str, tuple[object, ...]]
    figures: tuple[ComparedFigure, ...]
    latency: Breakdown | None
    moved: tuple[Moved, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the runs."""
        return tuple(s.label for s in self.sheets)

    @property
    def heads(self) -> tuple[str, ...]:
        """Heads of columns: the labels, or A, B, ... if a label is longer than `LABEL_LETTERS`."""
        if max(map(len, self.labels)) <= LABEL_LETTERS or len(self.labels) > len(ascii_uppercase):
            return self.labels
        return tuple(ascii_uppercase[: len(self.labels)])

    @property
    def problems(self) -> tuple[str, ...]:
        """Keys of inputs that change the problem: the times of such runs are times of different work."""
        return tuple(k for k in self.differences if k in ("workload", "ignored") or k.startswith("problem."))

    @cached_property
    def chains(self) -> tuple[tuple[Moved, ...], ...]:
        """For each run the chain of causes of its first cause, if that is a wait; empty for the first run."""
        return tuple(self._chain(run) for run in range(len(self.sheets)))

    def _chain(self, run: int) -> tuple[Moved, ...]:
        causes = self.latency.causes(run) if self.latency and run else ()
        if not self.latency or not causes or causes[0].kind != "wait":
            return ()
        return chain(self.sheets[0], self.sheets[run], self.latency.units[run], causes[0].name)

    def to_pandas(self) -> Any:
        """Return the figures as a `pandas.DataFrame`: a row for each quantity, and a column for each run.

        Raises `NpusimError` if pandas is not installed.
        """
        return frame(
            {"figure": f.name, "kind": f.kind, **dict(zip(self.labels, f.values, strict=True))} for f in self.figures
        )

    def __str__(self) -> str:
        return plain(comparison_table(self))

    def __repr__(self) -> str:
        """Return the runs, their times and the inputs that differ, on one line."""
        latency = next((f for f in self.figures if f.name == "latency us"), None)
        times = ""
        if latency is not None and all(isinstance(value, int | float) for value in latency.values):
            times = f"{' -> '.join(f'{value:,.2f}' for value in latency.values)} us; "
        names = list(self.differences)
        inputs = ", ".join(names[:NAMED]) or "no input"
        more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
        verb = "differs" if len(names) < 2 else "differ"
        return f"<Comparison of {', '.join(self.labels[:-1])} and {self.labels[-1]}: {times}{inputs}{more} {verb}>"

    def _repr_html_(self) -> str:
        return pre_html(comparison_table(self))


def compare(*runs: RunData | RunRecord | str | Path) -> Comparison:
    """Compare two or more runs with the first: why the latencies differ, which inputs differ, how the bits differ.

    A run is a result of `npusim.run`, its folder or ``result.json``, or the ``PipeUtilization.csv`` of a
    vendor's profiler.

    Raises `SpecError` if there are fewer than two runs, or if a file is not a run.
    """
    if len(runs) < 2:
        raise SpecError(f"compare needs two runs or more, not {len(runs)}")
    sheets = sheets_of(runs)
    return Comparison(sheets, _differences(sheets), tuple(_figures(sheets)), breakdown(sheets), tuple(_moved(sheets)))


def comparison_document(comparison: Comparison) -> dict[str, object]:
    """Return the comparison as JSON data."""
    c = comparison
    return document(
        "compare",
        version=2,
        runs=c.labels,
        problems=c.problems,
        differences=c.differences,
        latency=None if c.latency is None else _latency(c, c.latency),
        moved=MOVED.records(c.moved),
        figures=figure_columns(c.heads).records(c.figures),
    )


def _latency(c: Comparison, latency: Breakdown) -> dict[str, object]:
    runs = range(len(c.sheets))
    return {
        "units": latency.units,
        "clock_hz": [s.clock_hz for s in c.sheets],
        "cycles": [s.cycles for s in c.sheets],
        "time": c.sheets[0].time,
        "latency_us": [s.time_us for s in c.sheets],
        "parts": part_columns(latency, c.labels).records(latency.parts),
        "causes": [[str(p) for p in latency.causes(i)] if i else [] for i in runs],
        "chains": [STEP.records(steps) for steps in c.chains],
    }


def _differences(sheets: Sequence[Sheet]) -> dict[str, tuple[object, ...]]:
    """Return the inputs that differ, by dotted key; a profiler's file has no inputs."""
    known = [s for s in sheets if s.record is not None]
    keys = dict.fromkeys(key for s in known for key in s.inputs)
    changed = [key for key in keys if len({repr(s.inputs.get(key)) for s in known}) > 1]
    return {key: tuple(s.inputs.get(key) for s in sheets) for key in changed}


def _moved(sheets: Sequence[Sheet]) -> Iterator[Moved]:
    """Yield the differences of all units, the largest first; a second core with the same differences is omitted."""
    units = dict.fromkeys(u for s in sheets for u in s.units)
    moved = [m for u in units if not all(s.repeats(u) for s in sheets) for m in _of_unit(sheets, u)]
    yield from sorted(moved, key=lambda m: -max(abs(c - m.part.cycles[0]) for c in m.part.cycles))


def _of_unit(sheets: Sequence[Sheet], unit: str) -> Iterator[Moved]:
    for part in parts_of(sheets, [unit] * len(sheets)):
        if len(set(part.cycles)) > 1 and part.kind in ("work", "links", "wait"):
            works = [s.units[unit].work or {} if unit in s.units else {} for s in sheets]
            times = tuple(w.get(part.name, (0, 0))[0] for w in works) if part.kind == "work" else ()
            yield Moved(unit, part, times)


def _figures(sheets: Sequence[Sheet]) -> Iterator[ComparedFigure]:
    values = [_values(s) for s in sheets]
    for name, kind in dict.fromkeys(key for of_run in values for key in of_run):
        yield ComparedFigure(name, kind, tuple(of_run.get((name, kind)) for of_run in values))


def _values(sheet: Sheet) -> dict[tuple[str, Kind], Value]:
    values: dict[tuple[str, Kind], Value] = {}
    record, cycles = sheet.record, sheet.cycles or 1
    if sheet.cycles is not None:
        values[f"{sheet.time} us", "time"] = sheet.time_us
        values["cycles", "cycles"] = sheet.cycles
    if record is None:
        return values | {(f"{_core(name)} busy", "share"): unit.busy / cycles for name, unit in sheet.units.items()}
    timing, bits = record.timing, record.numerics
    if timing is not None:
        busiest = timing.busiest
        if sheet.time == "latency":
            values["latency us", "time"] = timing.latency_us
        values["method", "text"] = method_text(timing.method, timing.band)
        values["operations", "count"] = timing.operations
        values["busiest pipe", "text"] = None if busiest is None else busiest.pipe
        for use in timing.uses_of(timing.last_group):
            values[f"{_core(use.queue)} busy", "share"] = timing.busy_share(use)
        values |= {(f"{name} bytes", "bytes"): size for name, size in timing.link_bytes.items()}
    if bits is not None:
        if bits.against != "float64":
            values["errors against", "text"] = bits.against
        values["relative RMSE", "error"] = bits.rmse
        values["max |error|", "error"] = bits.max_abs_error
        is_comparable = bits.max_ulp is None or bits.max_ulp <= COMPARABLE_ULP
        values["max ULP", "count"] = bits.max_ulp if is_comparable else "not comparable"
        values["overflow", "count"] = sum(bits.overflow_counts.values())
        values["NaN", "count"] = sum(bits.nan_counts.values())
        values["NaN in output", "count"] = bits.nan_count
        values["Inf in output", "count"] = bits.inf_count
    return values


def _core(queue: str) -> str:
    """Return a queue's name as that of the first core group: ``cubecore0 CUBE``."""
    track = track_of(0, queue)
    return f"{track.core.rpartition('.')[2]} {track.pipe}"


# ---------------------------------------------------------------- as text


def comparison_table(c: Comparison) -> tuple[Block, ...]:
    """Return the table of ``npusim compare``: the reason first, then the parts, other changes, every figure."""
    heads, blocks = c.heads, list[Block]()
    blocks.append(Heading(f"{heads[0]} -> {', '.join(heads[1:])}"))
    if c.problems:
        text = "; ".join(f"{key} {_arrow(c.differences[key])}" for key in c.problems)
        warning = cells(f"the times are of different work: {text}", style="warn")
        blocks.append(Facts((("different problems", warning),)))
    if heads != c.labels:
        blocks.append(Facts(tuple((head, cells(label)) for head, label in zip(heads, c.labels, strict=True))))
    if measured := [s.label for s in c.sheets if s.record is None]:
        text = f"cores only, without launches: {', '.join(measured)} has no time of launches"
        blocks.append(Facts((("times", cells(text)),)))
    if c.latency is not None:
        blocks.append(Facts(tuple(_reasons(c, c.latency))))
    alone = {key for key, v in c.differences.items() if key.startswith("tiling.") and _only(v) is not None}
    inputs = [(key, cells(_arrow(v))) for key, v in c.differences.items() if key not in {*c.problems, *alone}]
    fields = {f"{n.removeprefix('tiling.')}=": v for n, v in c.differences.items() if n in alone}
    inputs += _alone(c, "tiling", fields)
    if inputs or not c.problems:
        blocks.append(Facts(tuple(inputs) or (("inputs", cells("the same")),)))
    if c.latency is not None:
        text = f"time of {_units(c.latency)} by activity, in the core group that ends last"
        blocks += [Facts((("parts", cells(text)),)), _parts_grid(c.latency, heads)]
    if grid := _moved_grid(c):
        blocks.append(grid)
    return (*blocks, *_figures_grid(c))


def _only(values: Sequence[object]) -> int | None:
    """Return the number of the only run that has a value; None if several runs have one."""
    known = [run for run, value in enumerate(values) if value is not None]
    return known[0] if len(known) == 1 else None


def _alone(c: Comparison, what: str, of: Mapping[str, Sequence[object]], between: str = " ") -> Iterator[Fact]:
    """Yield a line for each run with the values that only this run has."""
    for run, head in enumerate(c.heads):
        if values_alone := [f"{name}{values[run]}" for name, values in of.items() if _only(values) == run]:
            yield f"{what}, {head} alone", cells(between.join(values_alone))


def reason(latency: Breakdown, run: int) -> str:
    """Return a sentence that states why run ``run`` is slower or faster than the first."""
    old, new = (latency.sheets[i] for i in (0, run))
    before, after = old.time_us, new.time_us
    change = after - before
    unit = " -> ".join(dict.fromkeys((latency.units[0], latency.units[run])))
    if not latency.moved(run):
        return f"the same time as the first run: no activity of {unit} changed"
    causes = [f"{p} {latency.change_us(p, run):+,.2f} us" for p in latency.causes(run)]
    against = [p for p in latency.moved(run) if latency.change_us(p, run) * change < 0]
    but = f"; partly offset by {against[0]} {latency.change_us(against[0], run):+,.2f} us" if against else ""
    share = f" ({change / before * 100:+.1f} %)" if before else ""
    much = f"{abs(change):,.2f} us {'longer' if change > 0 else 'shorter'}{share}" if change else "as long"
    return f"{much}: {unit}: {', '.join(causes)}{but}"


def _reasons(c: Comparison, latency: Breakdown) -> Iterator[Fact]:
    for run in range(1, len(c.sheets)):
        behind = cells(f"behind the first, in cycles: {_chain_text(c, run)}", style="dim") if c.chains[run] else ()
        yield f"why {c.heads[run]}" if len(c.sheets) > 2 else "why", (Cell(reason(latency, run)), *behind)


def _chain_text(c: Comparison, run: int) -> str:
    return " < ".join(f"{s.unit} {s.part} {s.part.cycles[1] - s.part.cycles[0]:+,}" for s in c.chains[run])


def _chains(c: Comparison) -> Iterator[Fact]:
    """Yield, for each difference, the cause of its first cause."""
    for run in range(1, len(c.sheets)):
        if c.chains[run]:
            name = f"behind the first cause of {c.labels[run]}" if len(c.sheets) > 2 else "behind the first cause"
            yield name, cells(f"in cycles: {_chain_text(c, run)}")


def _units(latency: Breakdown) -> str:
    return ", ".join(dict.fromkeys(latency.units))


def _beside(
    titles: Sequence[str],
    value: Callable[[Any, int], str],
    style: Callable[[Any, int], Style] = lambda row, run: "",
    value_style: Callable[[Any], Style] = lambda row: "",
    **changes: Callable[[Any, int], str],
) -> Iterator[Column]:
    """Yield, by title, the columns of each run: its value, and its change relative to the first run."""
    for run, title in enumerate(titles):
        yield Column(title, _of(run, value), align=">", style=value_style)
        for name, change in changes.items() if run else ():
            yield Column(name, _of(run, change), align=">", style=_of(run, style))


def _of(run: int, function: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
    return lambda row: function(row, run)


def _signed(change: float, spec: str = "+,") -> str:
    return format(change, spec) if change else "="


def part_columns(latency: Breakdown, labels: Sequence[str]) -> Columns:
    """Return the columns of parts: tables have each run's time and its change, JSON the times in a list."""
    runs = range(len(labels))
    return Columns(
        *_PART,
        Column("part", str, key="text"),
        Column(None, lambda part: [latency.us(part, run) for run in runs], key="us"),
        *(Column(f"{labels[run]} us", _of(run, latency.us), ",.2f") for run in runs),
        *(Column(f"{labels[run]}, change us", _of(run, latency.change_us), "+,.2f") for run in runs[1:]),
    )


def _parts_grid(latency: Breakdown, heads: Sequence[str]) -> Grid:
    """Return the parts that changed, the largest first, the others combined, and their sum."""
    runs = range(1, len(latency.sheets))
    moved = [p for p in latency.ranked if any(latency.change_us(p, i) for i in runs)]
    shown = moved[:SHOWN]
    rows: list[tuple[str, Sequence[Part], Style]] = [(str(p), [p], "") for p in shown]
    if rest := [p for p in latency.parts if p not in shown]:
        still = "all others" if len(moved) > SHOWN else "all others, unchanged"
        rows.append((still, rest, "dim"))
    rows.append((latency.sheets[0].time, latency.parts, "title"))

    def us(row: tuple[str, Sequence[Part], Style], run: int) -> float:
        return sum(latency.us(p, run) for p in row[1])

    def change(row: tuple[str, Sequence[Part], Style], run: int) -> float:
        return us(row, run) - us(row, 0) if any(latency.change_us(p, i) for p in row[1] for i in runs) else 0.0

    def cycles(row: tuple[str, Sequence[Part], Style], run: int) -> int:
        return sum(p.cycles[run] - p.cycles[0] for p in row[1])

    def style(row: tuple[str, Sequence[Part], Style], run: int) -> Style:
        longer = change(row, run)
        return row[2] if row[2] == "dim" or not longer else "bad" if longer > 0 else "good"

    changes = {"change": lambda row, run: _signed(change(row, run), "+,.2f")}
    if latency.is_one_clock:
        changes["cycles"] = lambda row, run: _signed(cycles(row, run))
    titles = [f"{head} us" for head in heads]
    columns = _beside(titles, lambda row, run: f"{us(row, run):,.2f}", style, lambda row: row[2], **changes)
    return Columns(Column("", 0, style=lambda row: row[2] or "label"), *columns).grid(rows)


def _moved_grid(c: Comparison) -> Grid | None:
    """Return the operations and waits whose time changed most, in the units that all runs have; None if no time
    changed.
    """
    shared = [m for m in c.moved if all(m.unit in s.units for s in c.sheets)]
    if not shared:
        return None
    columns = _beside(
        [f"{c.heads[0]} cycles", *c.heads[1:]],
        lambda m, run: whole(m.part.cycles[run]),
        change=lambda m, run: _signed(m.part.cycles[run] - m.part.cycles[0]),
    )
    names = MOVED.named("moved: unit", "operation, or wait")
    grid = Columns(*names, *columns, *MOVED.named("times")).grid(shared[:SHOWN])
    if left := len(c.moved) - len(grid.rows):
        rest = (Cell(f"{left} more", "dim"), Cell("in --json", "dim"), *cells(*("" for _ in grid.header[2:])))
        return replace(grid, rows=(*grid.rows, rest))
    return grid


def figure_columns(heads: Sequence[str]) -> Columns:
    """Return the columns of figures: tables show each run's value and change; JSON has all values in lists."""
    runs = range(1, len(heads))
    return Columns(
        Column("", "name", style="label", key="name"),
        *keyed("kind", "values"),
        Column(None, lambda figure: [figure.change(run) for run in runs], key="changes"),
        Column(None, lambda figure: [figure.relative_change(run) for run in runs], key="relative_changes"),
        *_beside(heads, _written, _style, change=ComparedFigure.change),
    )


def _figures_grid(c: Comparison) -> Iterator[Block]:
    """Yield every figure, and for each run a line with the busy shares of the pipes that only this run has."""
    rows = [figure for figure in c.figures if not _repeats(figure, c.figures)]
    alone = [f for f in rows if f.kind == "share" and _only(f.values) is not None]
    yield figure_columns(c.heads).grid(f for f in rows if f not in alone)
    shares = {
        f.name.removesuffix("busy"): [None if v is None else _written(f, run) for run, v in enumerate(f.values)]
        for f in alone
    }
    if facts := tuple(_alone(c, "busy", shares, ", ")):
        yield Facts(facts)


def _repeats(figure: ComparedFigure, figures: tuple[ComparedFigure, ...]) -> bool:
    """Return whether a second core of a kind only repeats the first one's row."""
    first = re.sub(r"core[1-9]\d* ", "core0 ", figure.name)
    return first != figure.name and any(f.values == figure.values for f in figures if f.name == first)


def _written(figure: ComparedFigure, run: int) -> str:
    value = figure.values[run]
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    match figure.kind:
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
    """Return green for a decrease of a cost, red for an increase; neither for busy shares."""
    change = figure.relative_change(run)
    if not change or figure.kind not in ("time", "cycles", "error", "bytes"):
        return ""
    return "good" if change < 0 else "bad"


# ---------------------------------------------------------------- as a page


def comparison_part(c: Comparison) -> PagePart:
    """Return the part of a page that compares runs."""
    runs, latency = range(1, len(c.sheets)), c.latency
    subtitle = "Different problems: the times are of different work." if c.problems else f"compared with {c.labels[0]}"
    whys = [] if latency is None else [reason(latency, run) for run in runs]
    verdict = whys[:1] if len(whys) == 1 else [f"{c.labels[run]}: {why}" for run, why in zip(runs, whys, strict=False)]
    facts = [Facts(tuple(_chains(c)))] if any(c.chains) else []
    figures = (*_page_figures(c), *_inputs_figure(c))
    title = " and ".join(c.labels)
    return PagePart(title, subtitle, tuple(_tiles(c)), [*facts, *_figures_grid(c)], figures, "\n".join(verdict))


def _inputs_figure(c: Comparison) -> Iterator[Figure]:
    """Yield the inputs that differ as a table, which opens on demand."""
    rows = [(key, *("-" if v is None else str(v) for v in values)) for key, values in c.differences.items()]
    table = Columns(*(Column(title, number) for number, title in enumerate(("input", *c.labels))))
    if rows:
        title = f"{len(rows)} {plural(len(rows), 'input')} with unlike values"
        yield Figure("inputs", title, "", None, table.grid(rows), is_folded=True)


def _tiles(c: Comparison) -> Iterator[FigureTile]:
    for run, sheet in enumerate(c.sheets):
        if sheet.cycles is None:
            continue
        bits = None if sheet.record is None else sheet.record.numerics
        error = "" if bits is None else f"relative RMSE {bits.rmse:.2e}" if bits.rmse is not None else "not finite"
        change = next((f.change(run) for f in c.figures if f.name == f"{sheet.time} us"), "") if run else ""
        note = ", ".join(filter(None, (change, error)))
        yield FigureTile(sheet.label, f"{sheet.time_us:,.2f} us", note, error == "not finite")


def _page_figures(c: Comparison) -> Iterator[Figure]:
    if c.latency is not None:
        yield _changes(c, c.latency)
    values = {f.name: f.values for f in c.figures}
    times, errors = values.get("latency us", ()), values.get("relative RMSE", ())
    points = [
        {"name": label, "latency_us": us, "error": error}
        for label, us, error in zip(c.labels, times, errors, strict=False)
        if us is not None and error
    ]
    if len(points) >= 2:
        text = "Left is faster, down is nearer to float64. Runs with an output that is not finite are omitted."
        yield Figure("front", "Latency against error", text, charts.front(points), POINTS.grid(points))


def _changes(c: Comparison, latency: Breakdown) -> Figure:
    """Return the parts of each difference, with their signs."""
    runs = range(1, len(c.sheets))
    moved = [p for p in latency.ranked if any(latency.change_us(p, i) for i in runs)]
    drawn = [(str(p), [p]) for p in moved[:DRAWN]] + ([("all others", moved[DRAWN:])] if moved[DRAWN:] else [])
    rows: list[Row] = [
        {"part": name, "run": c.labels[i], "value": round(sum(latency.change_us(p, i) for p in parts), 4)}
        for i in runs
        for name, parts in drawn
    ]
    table = part_columns(latency, c.labels)
    text = f"Difference in time from {c.labels[0]}, by activity of {_units(latency)}; the parts add up to the whole."
    spec = charts.changes(rows) if rows else None
    return Figure("changes", "Why the latencies differ", text, spec, table.grid(latency.ranked))
