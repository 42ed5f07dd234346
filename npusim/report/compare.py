"""Two runs side by side: what differs in their inputs, and every figure old, new and changed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from npusim.machines.tracks import track_of
from npusim.report.bottleneck import bottleneck, deciding_group, queues_of
from npusim.report.record import RunRecord, record_of
from npusim.report.result_json import SCHEMA_VERSION, load_result
from npusim.report.text import (
    Block,
    Cell,
    Facts,
    Grid,
    Heading,
    Style,
    percent,
    plain,
    pre_html,
    whole,
)
from npusim.timing.result import method_text
from npusim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.report.record import NumericRecord, TimingRecord
    from npusim.run_result import RunResult

__all__ = ["Comparison", "Figure", "compare", "comparison_document", "comparison_table"]

Value = int | float | str | None
Kind = Literal["time", "cycles", "count", "share", "bytes", "error", "text"]

#: Ratios of errors within these bounds are written in percent, others as factors.
_NEAR = (0.5, 2.0)


@dataclass(frozen=True)
class Figure:
    """One quantity of both runs; ``kind`` says how it is written and how its change is."""

    name: str
    kind: Kind
    old: Value
    new: Value

    @property
    def relative_change(self) -> float | None:
        """(new - old) / old; None for text, for missing figures and where old is 0."""
        if not isinstance(self.old, int | float) or not isinstance(self.new, int | float):
            return None
        return (self.new - self.old) / self.old if self.old else None

    @property
    def change(self) -> str:
        """The change in the words of its kind: ``-29.2 %``, ``+18.0 pt``, ``x1.20``, ``+3``."""
        if self.old is None or self.new is None:
            return ""
        if isinstance(self.old, str) or isinstance(self.new, str):
            return "" if self.old == self.new else "changed"
        difference = self.new - self.old
        if not difference:
            return "="
        if self.kind == "share":
            return f"{difference * 100:+.1f} pt"
        if self.kind == "count":
            return f"{difference:+,}"
        if not self.old:
            return "new"
        ratio = self.new / self.old
        if self.kind == "error" and not _NEAR[0] < ratio < _NEAR[1]:
            return f"x{ratio:.3g}"
        change = f"{difference / self.old * 100:+.1f} %"
        return "~0 %" if change in ("+0.0 %", "-0.0 %") else change


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two runs compared: ``differences`` are inputs by dotted key, (old, new)."""

    old: RunRecord
    new: RunRecord
    differences: dict[str, tuple[object, object]]
    figures: tuple[Figure, ...]

    def __str__(self) -> str:
        return plain(comparison_table(self))

    def __repr__(self) -> str:
        changed = ", ".join(self.differences) or "the same inputs"
        return f"<Comparison of {self.old.name} and {self.new.name}: {changed}>"

    def _repr_html_(self) -> str:
        return pre_html(comparison_table(self))


def compare(
    old: RunResult | RunRecord | str | Path, new: RunResult | RunRecord | str | Path
) -> Comparison:
    """Compare two runs: results of `npusim.run`, run folders or ``result.json`` files.

    Raises `SpecError` if a file is no result of npusim.
    """
    a, b = _record(old), _record(new)
    return Comparison(a, b, dict(_differences(a, b)), tuple(_figures(a, b)))


def comparison_table(comparison: Comparison) -> tuple[Block, ...]:
    """Return the table that ``npusim compare`` prints."""
    a, b = comparison.old, comparison.new
    rows = [
        (
            Cell(figure.name, "label"),
            Cell(_written(figure.kind, figure.old)),
            Cell(_written(figure.kind, figure.new)),
            Cell(figure.change, _style(figure)),
        )
        for figure in comparison.figures
        if not _repeats(figure, comparison.figures)
    ]
    blocks: list[Block] = [Heading(f"{a.name} -> {b.name}")]
    if comparison.differences:
        inputs = tuple(
            (key, (Cell(f"{_input(one)} -> {_input(two)}"),))
            for key, (one, two) in comparison.differences.items()
        )
        blocks.append(Facts(inputs))
    else:
        blocks.append(Facts((("inputs", (Cell("the same"),)),)))
    blocks.append(Grid(("", "old", "new", "change"), "<>>>", tuple(rows)))
    return tuple(blocks)


def comparison_document(comparison: Comparison) -> dict[str, object]:
    """Return the comparison as JSON data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "npusim.compare",
        "old": comparison.old.name,
        "new": comparison.new.name,
        "differences": {
            key: {"old": one, "new": two} for key, (one, two) in comparison.differences.items()
        },
        "figures": [
            {
                "name": f.name,
                "kind": f.kind,
                "old": f.old,
                "new": f.new,
                "change": f.change,
                "relative_change": f.relative_change,
            }
            for f in comparison.figures
        ],
    }


def _record(run: RunResult | RunRecord | str | Path) -> RunRecord:
    if isinstance(run, RunRecord):
        return run
    return load_result(run) if isinstance(run, str | Path) else record_of(run)


def _differences(a: RunRecord, b: RunRecord) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield the inputs that differ, by dotted key."""
    flat_a, flat_b = dict(_inputs(a)), dict(_inputs(b))
    for key in dict.fromkeys([*flat_a, *flat_b]):
        if flat_a.get(key) != flat_b.get(key):
            yield key, (flat_a.get(key), flat_b.get(key))


def _inputs(record: RunRecord) -> Iterator[tuple[str, object]]:
    yield from {
        "npusim_version": record.npusim_version,
        "schedule": record.schedule,
        "precision": record.precision,
        "device.name": record.device.name,
        "device.digest": record.device.digest,
        "workload": record.workload,
        "ignored": ", ".join(record.ignored) or None,
    }.items()
    yield from _flat("problem", record.problem)
    yield from _flat("tiling", record.tiling)
    yield from _flat("formats", record.formats)
    if record.numerics is not None:
        yield "sample", record.numerics.sample
        yield "arithmetic", ", ".join(record.numerics.arithmetic)


def _flat(prefix: str, values: object) -> Iterator[tuple[str, object]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(f"{prefix}.{key}", value)
    else:
        yield prefix, values


def _figures(a: RunRecord, b: RunRecord) -> Iterator[Figure]:
    """Yield every figure that either run has."""
    one, two = _values(a), _values(b)
    for name, kind in dict.fromkeys([*one, *two]):
        yield Figure(name, kind, one.get((name, kind)), two.get((name, kind)))


def _values(record: RunRecord) -> dict[tuple[str, Kind], Value]:
    found: dict[tuple[str, Kind], Value] = {}
    timing = record.timing
    if timing is not None:
        busiest = bottleneck(timing)
        found["latency us", "time"] = timing.latency_us
        found["kernel cycles", "cycles"] = timing.cycles
        found["method", "text"] = method_text(timing.method, timing.band)
        found["operations", "count"] = timing.operations
        found["busiest pipe", "text"] = None if busiest is None else busiest.pipe
        found.update({(name, "share"): share for name, share in _busy(timing).items()})
        found.update({(f"{n} bytes", "bytes"): size for n, size in timing.link_bytes.items()})
    for name, value in _numeric_values(record.numerics).items():
        found[name, "error" if name in ("relative RMSE", "max |error|") else "count"] = value
    return found


def _numeric_values(bits: NumericRecord | None) -> dict[str, Value]:
    if bits is None:
        return {}
    return {
        "relative RMSE": bits.rmse,
        "max |error|": bits.max_abs_error,
        "max ULP": bits.max_ulp,
        "overflow": sum(bits.overflow_counts.values()),
        "NaN": sum(bits.nan_counts.values()),
        "NaN in output": bits.nan_count,
        "Inf in output": bits.inf_count,
    }


def _busy(timing: TimingRecord) -> dict[str, float]:
    """Return the busy shares in the core group that ends last, its core called ``cubecore0``."""
    found = {}
    for queue in queues_of(timing, deciding_group(timing)):
        track = track_of(queue.group, queue.queue)
        name = f"{track.core.rpartition('.')[2]} {track.pipe} busy"
        found[name] = queue.busy_cycles / (timing.cycles or 1)
    return found


def _repeats(figure: Figure, figures: tuple[Figure, ...]) -> bool:
    """Return whether a second core of a kind only repeats what the first one's row says."""
    first = re.sub(r"core[1-9]\d* ", "core0 ", figure.name)
    twins = [f for f in figures if f.name == first and first != figure.name]
    return any((f.old, f.new) == (figure.old, figure.new) for f in twins)


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


def _input(value: object) -> str:
    return "-" if value is None else str(value)


def _style(figure: Figure) -> Style:
    """Return green for less of what one wants less of, red for more; neither for busy shares."""
    change = figure.relative_change
    wanted_less = figure.kind in ("time", "cycles", "error", "bytes")
    if change is None or not change or not wanted_less:
        return ""
    return "good" if change < 0 else "bad"
